"""Collapse of the residual streams as one Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous


@triton.jit
def _hc_collapse_kernel(
    streams_ptr,
    pre_ptr,
    out_ptr,
    stride_t,
    stride_s,
    WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = h < WIDTH
    row_ptr = streams_ptr + token * stride_t + h
    total = tl.load(row_ptr, mask=is_column, other=0.0).to(tl.float32) * tl.load(pre_ptr + token * NUM_STREAMS)
    for s in tl.static_range(1, NUM_STREAMS):
        part = tl.load(row_ptr + s * stride_s, mask=is_column, other=0.0).to(tl.float32)
        total += part * tl.load(pre_ptr + token * NUM_STREAMS + s)
    tl.store(out_ptr + token * WIDTH + h, total, mask=is_column)


def hc_collapse_triton(streams: torch.Tensor, pre: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Launch the kernel on arguments ``hc_collapse`` has checked."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty((num_tokens, width), dtype=out_dtype or streams.dtype, device=streams.device)
    if out.numel() > 0:
        streams = last_axis_contiguous(streams)
        _hc_collapse_kernel[(num_tokens, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            streams,
            pre.contiguous(),
            out,
            streams.stride(0),
            streams.stride(1),
            WIDTH=width,
            NUM_STREAMS=num_streams,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
