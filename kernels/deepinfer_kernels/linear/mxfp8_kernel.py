"""Product of few rows with an MXFP8 weight, unpacked in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import spread_scale, unpack_e4m3


@triton.jit
def _mxfp8_narrow_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_out,
    x_stride_m,
    out_stride_m,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    group = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows behind the end repeat the last one: no mask, and nothing of them is stored.
    n_row = group * num_out + tl.minimum(n, num_out - 1)
    m_row = tl.minimum(m, num_rows - 1).to(tl.int64)
    word = tl.arange(0, BLOCK_K // 2)
    block = tl.arange(0, BLOCK_K // 32)
    weight_ptrs = weight_ptr + n_row.to(tl.int64)[:, None] * (K // 2) + word[None, :]
    scale_ptrs = scale_ptr + (n_row // 32)[:, None] * (K // 32) + block[None, :]
    x_ptrs = x_ptr + m_row[None, :] * x_stride_m + group * PADDED_K + word[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, PADDED_K, BLOCK_K, num_stages=NUM_STAGES):
        if K == PADDED_K:
            words = tl.load(weight_ptrs + start // 2)
            scale = tl.load(scale_ptrs + start // 32)
        else:
            words = tl.load(weight_ptrs + start // 2, mask=(start // 2 + word < K // 2)[None, :], other=0)
            scale = tl.load(scale_ptrs + start // 32, mask=(start // 32 + block < K // 32)[None, :], other=0)
        x0 = tl.load(x_ptrs + start)
        x1 = tl.load(x_ptrs + (start + BLOCK_K // 2))
        w0, w1 = unpack_e4m3(words, spread_scale(scale, BLOCK_N, BLOCK_K // 32, 16))
        acc = tl.dot(w0, x0, acc)
        acc = tl.dot(w1, x1, acc)
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * out_stride_m + group * num_out + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[None, :] & (n < num_out)[:, None])


def mxfp8_narrow(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    tile: MatmulTile,
) -> torch.Tensor:
    """Multiply prepared rows ``x`` [M, G * padded K] with the groups of ``weight`` [G * N, K]; [M, G * N]."""
    num_rows, num_out = x.shape[0], weight.shape[0] // num_groups
    out = torch.empty((num_rows, weight.shape[0]), dtype=out_dtype, device=x.device)
    grid = (triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows), num_groups)
    _mxfp8_narrow_kernel[grid](
        x,
        weight.view(torch.int16),
        scale,
        out,
        num_rows,
        num_out,
        x.stride(0),
        out.stride(0),
        K=weight.shape[1],
        PADDED_K=x.shape[1] // num_groups,
        BLOCK_N=tile.columns,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.WORD_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
