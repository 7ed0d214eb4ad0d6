"""Update of the residual streams as one Triton kernel: every stream is read once and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc, var-annotated"

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.linear.parts_kernel import load_product


@triton.jit
def write_streams(
    y,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    token,
    h,
    stride_t,
    stride_s,
    WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
):
    """Columns ``h`` of the new streams of ``token`` from fp32 ``y``, the sublayer's output rounded."""
    is_column = h < WIDTH
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


@triton.jit(do_not_specialize=["part_stride"])
def _hc_post_kernel(
    y_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    y_stride_t,
    part_stride,
    stride_t,
    stride_s,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = load_product(y_ptr + token * y_stride_t + h, part_stride, h < WIDTH, NUM_PARTS, DTYPE)
    write_streams(y, streams_ptr, post_ptr, comb_ptr, out_ptr, token, h, stride_t, stride_s, WIDTH, NUM_STREAMS)


def hc_post_triton(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments ``hc_post`` has checked."""
    return post_parts_triton(last_axis_contiguous(y)[None], streams, post, comb, y.dtype, out_dtype)


def post_parts_triton(
    y_parts: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same where the parts of the sublayer's output [parts, M, hidden_size] are still to be added and rounded."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=out_dtype or dtype, device=streams.device)
    if out.numel() > 0:
        streams = last_axis_contiguous(streams)
        early = starts_early(streams.device)
        _hc_post_kernel[(num_tokens, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            y_parts,
            streams,
            post.contiguous(),
            comb.contiguous(),
            out,
            y_parts.stride(1),
            y_parts.stride(0),
            streams.stride(0),
            streams.stride(1),
            NUM_PARTS=y_parts.shape[0],
            DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            WIDTH=width,
            NUM_STREAMS=num_streams,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
            IS_EARLY=early,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return out
