"""Clamped SwiGLU: the hidden values of an expert."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import UnsupportedError
from deepinfer_kernels.swiglu.reference import swiglu_reference


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, row_weight: torch.Tensor | None = None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight.

    Args:
        gate: [M, I] bf16 or fp32, clamped from above only.
        up: [M, I], dtype of ``gate``.
        limit: swiglu_limit, >= 0; 0 turns both clamps off.
        row_weight: [M] fp32, routing weight of the row, or None.

    Returns:
        [M, I], dtype of ``gate``, a new tensor; computed in fp32, the weight included, rounded once.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one, or ``limit`` is negative.

    Invariance: bitwise per row; silu is ``pointwise.silu``, whose value does not depend on the place of an element.
    Source: REF, class Expert; specification, section 2.10 step 5.
    """
    checks.require_activation("swiglu", "gate", gate)
    checks.require_dtype("swiglu", "up", up, (gate.dtype,))
    checks.require_rank("swiglu", "gate", gate, 2, "[M, I]")
    checks.require_shape("swiglu", "up", up, gate.shape, "up has the shape of gate")
    if row_weight is not None:
        checks.require_dtype("swiglu", "row_weight", row_weight, (torch.float32,))
        checks.require_shape("swiglu", "row_weight", row_weight, gate.shape[:1], "one weight per row of gate")
    if not limit >= 0:
        raise UnsupportedError(f"swiglu: limit is {limit}, expected >= 0; pass 0 to turn the clamps off")
    if use_triton(gate):
        from deepinfer_kernels.swiglu.triton_kernel import swiglu_triton

        return swiglu_triton(gate, up, limit, row_weight)
    return swiglu_reference(gate, up, limit, row_weight)
