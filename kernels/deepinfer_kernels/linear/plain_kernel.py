"""Product of few bf16 rows with a bf16 weight."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.parts_kernel import add_parts, parts_for
from deepinfer_kernels.tiling import MatmulTile


@triton.jit
def _plain_narrow_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride_m,
    weight_stride_n,
    out_stride_m,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    part = tl.program_id(2)
    # Outputs behind the end repeat the last one, so that the weight needs no mask; rows behind the end are not read.
    is_row = (m < num_rows)[None, :]
    weight_ptrs = weight_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * weight_stride_n + k[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * x_stride_m + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    end = tl.minimum((part + 1) * SPLIT_K, K)
    for start in tl.range(part * SPLIT_K, end, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=is_row, other=0.0)
        else:
            weight = tl.load(weight_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=is_row & (start + k < K)[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    m_out = part.to(tl.int64) * num_rows + m
    out_ptrs = out_ptr + m_out[None, :] * out_stride_m + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row & (n < num_out)[:, None])


def plain_narrow(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, tile: MatmulTile, split_k: int
) -> torch.Tensor:
    """Multiply bf16 ``x`` [M, K] with the transpose of bf16 ``weight`` [N, K], both with contiguous last axes.

    Returns:
        [M, N] of ``out_dtype``; the sum over K is cut in parts of ``split_k``, which are added in ascending order.
    """
    num_rows, num_out = x.shape[0], weight.shape[0]
    num_parts = -(-weight.shape[1] // split_k)
    out = parts_for(num_parts, num_rows, num_out, out_dtype, x.device)
    _plain_narrow_kernel[(triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows), num_parts)](
        x,
        weight,
        out,
        num_rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        num_out,
        K=weight.shape[1],
        SPLIT_K=split_k,
        BLOCK_N=tile.columns,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.PLAIN_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return add_parts(out, out_dtype)
