"""The sum of the expert outputs on an NVIDIA GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous


@triton.jit
def sum_of_experts(expert_ptrs, shared_ptrs, is_column, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 sum of the experts' rows of a token, TOP_K rows of WIDTH values, in slot order, and of the shared expert."""
    total = tl.load(expert_ptrs, mask=is_column, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, TOP_K):
        total += tl.load(expert_ptrs + slot * WIDTH, mask=is_column, other=0.0).to(tl.float32)
    return total + tl.load(shared_ptrs, mask=is_column, other=0.0).to(tl.float32)


@triton.jit
def _moe_combine_kernel(
    expert_out_ptr,
    shared_out_ptr,
    out_ptr,
    shared_stride_t,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    expert_ptrs = expert_out_ptr + token * (TOP_K * WIDTH) + column
    shared_ptrs = shared_out_ptr + token * shared_stride_t + column
    total = sum_of_experts(expert_ptrs, shared_ptrs, is_column, TOP_K, WIDTH)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=is_column)


def moe_combine_triton(expert_out: torch.Tensor, shared_out: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on arguments ``moe_combine`` has already checked."""
    num_tokens, top_k, width = expert_out.shape
    out = torch.empty((num_tokens, width), dtype=expert_out.dtype, device=expert_out.device)
    if num_tokens > 0 and width > 0:
        shared_out = last_axis_contiguous(shared_out)
        _moe_combine_kernel[(num_tokens, triton.cdiv(width, tiling.ELEMENTWISE_BLOCK))](
            expert_out.contiguous(),
            shared_out,
            out,
            shared_out.stride(0),
            TOP_K=top_k,
            WIDTH=width,
            BLOCK=tiling.ELEMENTWISE_BLOCK,
        )
    return out
