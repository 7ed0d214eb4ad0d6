"""Update of the residual streams as one Triton kernel: every stream is read once and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous


@triton.jit
def _hc_post_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    y_stride_t,
    stride_t,
    stride_s,
    WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = h < WIDTH
    y = tl.load(y_ptr + token * y_stride_t + h, mask=is_column, other=0.0).to(tl.float32)
    sources = ()
    for i in tl.static_range(NUM_STREAMS):
        source_ptr = streams_ptr + token * stride_t + i * stride_s + h
        sources = sources + (tl.load(source_ptr, mask=is_column, other=0.0).to(tl.float32),)  # noqa: RUF005
    comb_ptr += token * (NUM_STREAMS * NUM_STREAMS)
    for j in tl.static_range(NUM_STREAMS):
        total = sources[0] * tl.load(comb_ptr + j)
        for i in tl.static_range(1, NUM_STREAMS):
            total += sources[i] * tl.load(comb_ptr + i * NUM_STREAMS + j)
        total += y * tl.load(post_ptr + token * NUM_STREAMS + j)
        tl.store(out_ptr + (token * NUM_STREAMS + j) * WIDTH + h, total, mask=is_column)


def hc_post_triton(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``hc_post`` has checked."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=out_dtype or y.dtype, device=y.device)
    if out.numel() > 0:
        y, streams = last_axis_contiguous(y), last_axis_contiguous(streams)
        _hc_post_kernel[(num_tokens, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            y,
            streams,
            post.contiguous(),
            comb.contiguous(),
            out,
            y.stride(0),
            streams.stride(0),
            streams.stride(1),
            WIDTH=width,
            NUM_STREAMS=num_streams,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
