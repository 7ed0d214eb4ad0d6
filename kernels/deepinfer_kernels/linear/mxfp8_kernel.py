"""Product of few rows with an MXFP8 weight, unpacked in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.linear.parts_kernel import add_parts, parts_for
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import WEIGHT_SHIFT, load_packed_scale, unpack_e4m3


@triton.jit(do_not_specialize=["num_rows"])
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
    SHIFT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    group = tl.program_id(2) // tl.cdiv(PADDED_K, SPLIT_K)
    part = tl.program_id(2) % tl.cdiv(PADDED_K, SPLIT_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Outputs and rows behind the end repeat the last one, so that loads need no mask, except the rows of small tiles:
    # unmasked, one row would cost as much L2 traffic as the weight.
    n_row = group * num_out + tl.minimum(n, num_out - 1)
    is_row = (m < num_rows)[None, :]
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // 2)
    weight_ptrs = weight_ptr + n_row.to(tl.int64)[:, None] * (K // 2) + word[None, :]
    scale_ptrs = scale_ptr + n_row // 32 * (K // 32)
    m_row = tl.minimum(m, num_rows - 1).to(tl.int64)
    x_ptrs = x_ptr + m_row[None, :] * x_stride_m + group * PADDED_K + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    end = tl.minimum((part + 1) * SPLIT_K, PADDED_K)
    wait_for_inputs(IS_EARLY)
    for start in tl.range(part * SPLIT_K, end, BLOCK_K, num_stages=NUM_STAGES):
        if K == PADDED_K:
            words = tl.load(weight_ptrs + start // 2)
        else:
            words = tl.load(weight_ptrs + start // 2, mask=(start // 2 + word < K // 2)[None, :], other=0)
        scale = load_packed_scale(scale_ptrs, start, K, PADDED_K)
        x = tl.load(x_ptrs + start, mask=is_row, other=0.0) if BLOCK_M <= 32 else tl.load(x_ptrs + start)
        acc = tl.dot(unpack_e4m3(words, scale, BLOCK_N), x, acc)
    m_out = part.to(tl.int64) * num_rows + m
    out_ptrs = out_ptr + m_out[None, :] * out_stride_m + group * num_out + n[:, None]
    tl.store(out_ptrs, (acc * SHIFT).to(out_ptr.dtype.element_ty), mask=is_row & (n < num_out)[:, None])


def mxfp8_narrow_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    tile: MatmulTile,
    split_k: int,
) -> torch.Tensor:
    """Multiply prepared rows ``x`` [M, G * padded K] with the groups of ``weight`` [G * N, K].

    Returns:
        [parts, M, G * N] fp32, the sums over parts of ``split_k`` of K; of ``out_dtype`` where there is one part.
    """
    num_rows, num_out = x.shape[0], weight.shape[0] // num_groups
    depth = x.shape[1] // num_groups
    num_parts = -(-depth // split_k)
    out = parts_for(num_parts, num_rows, weight.shape[0], out_dtype, x.device)
    early = starts_early(x.device)
    grid = (triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows), num_groups * num_parts)
    _mxfp8_narrow_kernel[grid](
        x,
        weight.view(torch.int16),
        scale,
        out,
        num_rows,
        num_out,
        x.stride(0),
        weight.shape[0],
        K=weight.shape[1],
        PADDED_K=depth,
        SHIFT=WEIGHT_SHIFT,
        SPLIT_K=split_k,
        BLOCK_N=tile.columns,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.WORD_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        IS_EARLY=early,
        num_warps=tile.num_warps,
        launch_pdl=early,
    )
    return out


def mxfp8_narrow(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    tile: MatmulTile,
    split_k: int,
) -> torch.Tensor:
    """The same with the parts added in ascending order: [M, G * N] of ``out_dtype``."""
    return add_parts(mxfp8_narrow_parts(x, weight, scale, num_groups, out_dtype, tile, split_k), out_dtype)
