"""Input of a sublayer: collapse of the streams, norm, and the rows its products read."""

from typing import NamedTuple

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_norm.reference import hc_norm_reference
from deepinfer_kernels.tiling import MX_BLOCK


class SublayerInput(NamedTuple):
    """One row per token: the normed input, and what products with packed weights read of it.

    x: [T, d], dtype of the streams.
    rows: [T, any width], for ``mxfp8_prepared_linear`` and its relatives; to be read by them only.
    expert_rows: the same for ``moe_experts``; ``rows`` again where nobody asked for them.
    """

    x: torch.Tensor
    rows: torch.Tensor
    expert_rows: torch.Tensor


def hc_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, *, quantize: bool, for_experts: bool
) -> SublayerInput:
    """Sum the streams with the weights ``pre``, divide by the root mean square, multiply by ``weight``, quantise.

    Args:
        streams: [T, S, d] bf16 or fp32, S >= 1, d a multiple of 32.
        pre: [T, S] fp32.
        weight: [d] bf16 or fp32, of the norm.
        eps: added to the mean square; > 0.
        quantize: round the rows of the products to MXFP8.
        for_experts: prepare rows for the routed experts as well.

    Returns:
        ``x`` as ``rms_norm(hc_collapse(streams, pre), weight, eps)`` gives it, with the rows for the products.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one, or ``eps`` is not positive.

    Invariance: bitwise per token; the sum over d has one written order.
    Source: REF, Block.hc_pre, RMSNorm and linear.
    """
    checks.require_activation("hc_norm", "streams", streams)
    checks.require_activation("hc_norm", "weight", weight)
    checks.require_dtype("hc_norm", "pre", pre, (torch.float32,))
    checks.require_rank("hc_norm", "streams", streams, 3, "[T, S, d]")
    checks.require_multiple("hc_norm", "streams", streams, MX_BLOCK)
    if streams.shape[1] == 0:
        raise ShapeError(f"hc_norm: streams is {list(streams.shape)}, expected at least one stream; pass [T, S, d]")
    checks.require_shape("hc_norm", "pre", pre, streams.shape[:2], "one weight per stream of every token")
    checks.require_shape("hc_norm", "weight", weight, streams.shape[2:], "one value per element of the last axis")
    if not eps > 0:
        raise UnsupportedError(f"hc_norm: eps is {eps}, expected > 0; a row of zeros would become NaN")
    if use_triton(streams):
        from deepinfer_kernels.hc_norm.triton_kernel import hc_norm_triton

        return SublayerInput(*hc_norm_triton(streams, pre, weight, eps, quantize=quantize, for_experts=for_experts))
    x, rows = hc_norm_reference(streams, pre, weight, eps, quantize)
    return SublayerInput(x, rows, rows)
