"""Latent queries and keys of attention: two products with the same rows, a norm behind each."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import UnsupportedError
from deepinfer_kernels.latent_projections.reference import latent_projections_reference
from deepinfer_kernels.linear.weights import Weight, check_prepared, check_stackable


def latent_projections(
    rows: torch.Tensor,
    q_weight: Weight,
    kv_weight: Weight,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply prepared rows with the weights of the queries and of the keys, norm both, quantise the queries.

    Args:
        rows: [M, ...] as ``hc_norm`` prepares them for products, from K columns.
        q_weight: MXFP8 weight [Nq, K] float8_e4m3fn and its scale [Nq/32, K/32] uint8; Nq a multiple of 32. On a GPU
            one product serves both weights; it reads them in place where keys follow queries in memory.
        kv_weight: the same with Nkv rows.
        q_norm: [Nq] bf16 or fp32.
        kv_norm: [Nkv] bf16 or fp32.
        eps: of both norms; > 0.
        out_dtype: bf16 or fp32; products and norms round to it.
        quantize: round the normed queries to MXFP8.

    Returns:
        Queries as ``mxfp8_prepared_linear`` reads them [M, ...], and keys [M, Nkv] of ``out_dtype``.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one, or ``eps`` is not positive.

    Invariance: bitwise per row; a row depends on that row and the weights only.
    Source: REF, wq_a, wkv, q_norm and kv_norm; specification, section 2.8.
    """
    op = "latent_projections"
    checks.require_out_dtype(op, "out_dtype", out_dtype)
    check_prepared(op, rows, q_weight)
    check_prepared(op, rows, kv_weight)
    check_stackable(op, "q_weight", q_weight, kv_weight)
    for name, norm, weight in (("q_norm", q_norm, q_weight), ("kv_norm", kv_norm, kv_weight)):
        checks.require_activation(op, name, norm)
        checks.require_shape(op, name, norm, weight[0].shape[:1], "one value per row of its weight")
    if not eps > 0:
        raise UnsupportedError(f"{op}: eps is {eps}, expected > 0; a row of zeros would become NaN")
    if use_triton(rows):
        from deepinfer_kernels.latent_projections.triton_kernel import latent_projections_triton

        return latent_projections_triton(
            rows, q_weight, kv_weight, q_norm, kv_norm, eps, out_dtype=out_dtype, quantize=quantize
        )
    return latent_projections_reference(rows, q_weight, kv_weight, q_norm, kv_norm, eps, out_dtype, quantize)
