"""Sum of all experts and update of the streams as one Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.hc_post.triton_kernel import write_streams
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.moe_combine.triton_kernel import sum_of_experts


@triton.jit
def _combine_post_kernel(
    routed_ptr,
    shared_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    stride_t,
    stride_s,
    TOP_K: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    routed_ptrs = routed_ptr + token * (TOP_K * WIDTH) + h
    total = sum_of_experts(routed_ptrs, shared_ptr + token * WIDTH + h, h < WIDTH, TOP_K, WIDTH)
    y = total.to(DTYPE).to(tl.float32)
    write_streams(y, streams_ptr, post_ptr, comb_ptr, out_ptr, token, h, stride_t, stride_s, WIDTH, NUM_STREAMS)


def experts_output_triton(
    routed: torch.Tensor, shared: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on arguments ``experts_output`` has already checked."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=routed.dtype, device=streams.device)
    if out.numel() > 0:
        streams = last_axis_contiguous(streams)
        early = starts_early(streams.device)
        _combine_post_kernel[(num_tokens, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            routed.contiguous(),
            shared.contiguous(),
            streams,
            post.contiguous(),
            comb.contiguous(),
            out,
            streams.stride(0),
            streams.stride(1),
            TOP_K=routed.shape[1],
            DTYPE=tl.bfloat16 if routed.dtype == torch.bfloat16 else tl.float32,
            WIDTH=width,
            NUM_STREAMS=num_streams,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
            IS_EARLY=early,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return out
