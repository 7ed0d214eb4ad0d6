"""Collapse of the residual streams into the input of a sublayer."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.hc_collapse.reference import hc_collapse_reference
from deepinfer_kernels.hc_collapse.triton_kernel import hc_collapse_triton


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Sum the streams of every token with the weights ``pre``.

    Args:
        streams: [T, S, d] bf16 or fp32, S >= 1.
        pre: [T, S] fp32.

    Returns:
        [T, d], dtype of ``streams``, a new tensor; products and the serial sum over s in fp32, rounded once.

    Raises:
        ShapeError: ``pre`` does not fit ``streams``.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per token.
    Source: REF, Block.hc_pre; specification, section 2.2.
    """
    checks.require_activation("hc_collapse", "streams", streams)
    checks.require_dtype("hc_collapse", "pre", pre, (torch.float32,))
    checks.require_rank("hc_collapse", "streams", streams, 3, "[T, S, d]")
    if streams.shape[1] == 0:
        raise ShapeError(f"hc_collapse: streams is {list(streams.shape)}, expected at least one stream; pass [T, S, d]")
    checks.require_shape("hc_collapse", "pre", pre, streams.shape[:2], "one weight per stream of every token")
    if use_triton(streams):
        return hc_collapse_triton(streams, pre)
    return hc_collapse_reference(streams, pre)
