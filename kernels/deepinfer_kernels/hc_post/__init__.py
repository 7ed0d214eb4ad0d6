"""Update of the residual streams with the output of a sublayer."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_tilelang, use_triton
from deepinfer_kernels.hc_post.reference import hc_post_reference
from deepinfer_kernels.hc_post.triton_kernel import hc_post_triton


def hc_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Mix the old streams and add the output: out[j] = sum over i of comb[i, j] * streams[i] + post[j] * y.

    Args:
        y: [T, d] bf16 or fp32, output of the sublayer.
        streams: [T, S, d], dtype of ``y``, the streams the sublayer read.
        post: [T, S] fp32.
        comb: [T, S, S] fp32, axis 1 the source stream i, axis 2 the destination j.

    Returns:
        [T, S, d], dtype of ``y``, a new tensor; in fp32, i ascending, then post * y (REF's order), rounded once.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per token; products and sums are rounded separately, no FMA.
    Source: REF, Block.hc_post; specification, section 2.2.
    """
    checks.require_activation("hc_post", "y", y)
    checks.require_dtype("hc_post", "streams", streams, (y.dtype,))
    checks.require_dtype("hc_post", "post", post, (torch.float32,))
    checks.require_dtype("hc_post", "comb", comb, (torch.float32,))
    checks.require_rank("hc_post", "streams", streams, 3, "[T, S, d]")
    num_tokens, num_streams, width = streams.shape
    checks.require_shape("hc_post", "y", y, (num_tokens, width), "one row per token of streams")
    checks.require_shape("hc_post", "post", post, (num_tokens, num_streams), "one weight per stream of every token")
    expected = (num_tokens, num_streams, num_streams)
    checks.require_shape("hc_post", "comb", comb, expected, "one weight per pair of streams of every token")
    if use_tilelang(y):
        from deepinfer_kernels.hc_post.tilelang_kernel import hc_post_tilelang

        return hc_post_tilelang(y, streams, post, comb)
    if use_triton(y):
        return hc_post_triton(y, streams, post, comb)
    return hc_post_reference(y, streams, post, comb)
