"""Mix logits of the manifold hyper-connections (mHC): one small projection of all streams of a token."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_tilelang, use_triton
from deepinfer_kernels.hc_mix.reference import hc_mix_reference
from deepinfer_kernels.hc_mix.triton_kernel import hc_mix_triton


def hc_mix(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Project the concatenated streams, then divide by their common root mean square.

    Args:
        streams: [T, S, d] bf16 or fp32; flattened stream by stream.
        fn: [(2 + S) * S, S * d] fp32.
        eps: added to the mean square over all S * d values; rms_norm_eps of the model.

    Returns:
        [T, (2 + S) * S] fp32: S logits of pre, S of post, S * S of comb, as ``hc_sinkhorn`` reads them.

    Raises:
        ShapeError: ``fn`` does not fit ``streams``.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per token; a row depends on that token's streams and ``fn`` only.
    Source: REF, Block.hc_pre; specification, section 2.2.
    """
    checks.require_activation("hc_mix", "streams", streams)
    checks.require_dtype("hc_mix", "fn", fn, (torch.float32,))
    checks.require_rank("hc_mix", "streams", streams, 3, "[T, S, d]")
    num_streams, width = streams.shape[1:]
    expected = ((2 + num_streams) * num_streams, num_streams * width)
    checks.require_shape("hc_mix", "fn", fn, expected, "it has (2 + S) * S rows over all streams")
    if use_tilelang(streams) and streams.dtype == torch.bfloat16:
        from deepinfer_kernels.hc_mix.tilelang_kernel import hc_mix_tilelang

        return hc_mix_tilelang(streams, fn, eps)
    if use_triton(streams):
        return hc_mix_triton(streams, fn, eps)
    return hc_mix_reference(streams, fn, eps)
