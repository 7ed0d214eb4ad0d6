"""The expert that every token passes."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.linear.weights import Weight, check_prepared, check_stackable
from deepinfer_kernels.shared_expert.reference import shared_expert_reference


def shared_expert(
    rows: torch.Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    out_dtype: torch.dtype,
    quantize: bool,
    num_shards: int = 1,
) -> torch.Tensor:
    """``w2 @ swiglu(w1 @ x, w3 @ x)`` for every row.

    Args:
        rows: [T, ...] as ``hc_norm`` prepares the input x of the layer for products, from d columns.
        w1: gate weight, MXFP8: [inner, d] float8_e4m3fn and its scale [inner/32, d/32] uint8; inner a multiple of 32.
            On a GPU one product serves w1 and w3, in place where w3 follows w1 in memory.
        w3: up weight, the same shapes.
        w2: [d_out, inner] and its scale.
        limit: of the SwiGLU; 0 turns the clamp off.
        out_dtype: bf16 or fp32; products and SwiGLU round to it.
        quantize: round the input of w2 to MXFP8 first.
        num_shards: w2 is one of this many equal shares of the layer's outputs, see ``mxfp8_linear``.

    Returns:
        [T, d_out] of ``out_dtype``, a new tensor.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row; a row depends on that row and the weights only.
    Source: REF, class Expert; specification, section 2.10.
    """
    op = "shared_expert"
    checks.require_out_dtype(op, "out_dtype", out_dtype)
    for weight in (w1, w3):
        check_prepared(op, rows, weight)
    check_stackable(op, "w1", w1, w3)
    checks.require_shape(op, "w3", w3[0], w1[0].shape, "gate and up have the same outputs")
    checks.require_shape(op, "w2", w2[0], (w2[0].shape[0], w1[0].shape[0]), "it reads the hidden values")
    if use_triton(rows):
        from deepinfer_kernels.shared_expert.triton_kernel import shared_expert_triton

        return shared_expert_triton(
            rows, w1, w3, w2, limit=limit, out_dtype=out_dtype, quantize=quantize, num_shards=num_shards
        )
    return shared_expert_reference(rows, w1, w3, w2, limit, out_dtype, quantize)
