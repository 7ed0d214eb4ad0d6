"""Product of many rows with a bf16 weight, both fetched by the tensor memory accelerator."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_kernels import tiling
from deepinfer_kernels.tiling import MatmulTile

# The accelerator wants rows and bases that start on multiples of 16 bytes.
_ALIGNMENT_BYTES = 16


@triton.jit
def _wide_matmul_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    num_rows,
    num_out,
    out_stride_m,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    PART_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    group = tl.program_id(1)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_out, BLOCK_N)
    strip = tl.program_id(0) // (GROUP_ROWS * tiles_n)
    strip_rows = tl.minimum(tiles_m - strip * GROUP_ROWS, GROUP_ROWS)
    within = tl.program_id(0) % (GROUP_ROWS * tiles_n)
    first_m = (strip * GROUP_ROWS + within % strip_rows) * BLOCK_M
    first_n = within // strip_rows * BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if PART_STEPS < STEPS:
        # One loop over all parts: loads run ahead across the end of a part, and only there the product is waited for.
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
            x = x_desc.load([first_m, group * K + step * BLOCK_K])
            weight = weight_desc.load([group * num_out + first_n, step * BLOCK_K])
            acc = tl.dot(x, weight.T, acc)
            if step % PART_STEPS == PART_STEPS - 1:
                total += acc
                acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        acc = total + acc if STEPS % PART_STEPS != 0 else total
    else:
        for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
            x = x_desc.load([first_m, group * K + step * BLOCK_K])
            weight = weight_desc.load([group * num_out + first_n, step * BLOCK_K])
            acc = tl.dot(x, weight.T, acc)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride_m + (group * num_out + n)[None, :]
    tl.store(
        out_ptrs, (acc * SHIFT).to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < num_out)[None, :]
    )


def is_wide_operand(x: torch.Tensor) -> bool:
    """Whether the accelerator can fetch tiles of the bf16 matrix ``x``."""
    return x.stride(1) == 1 and x.stride(0) * 2 % _ALIGNMENT_BYTES == 0 and x.data_ptr() % _ALIGNMENT_BYTES == 0


def wide_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    tile: MatmulTile,
    split_k: int,
    shift: float = 1.0,
) -> torch.Tensor:
    """Multiply bf16 ``x`` [M, G * K] with the groups of bf16 ``weight`` [G * N, K], the result with ``shift``.

    Returns:
        [M, G * N] of ``out_dtype``; the sum over K is cut in parts of ``split_k``, which are added in ascending order.
    """
    num_rows, num_out = x.shape[0], weight.shape[0] // num_groups
    out = torch.empty((num_rows, weight.shape[0]), dtype=out_dtype, device=x.device)
    block_k = tiling.WIDE_BLOCK_K
    x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.rows, block_k])
    weight_desc = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tile.columns, block_k])
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.columns), num_groups)
    _wide_matmul_kernel[grid](
        x_desc,
        weight_desc,
        out,
        num_rows,
        num_out,
        out.stride(0),
        K=weight.shape[1],
        SHIFT=shift,
        PART_STEPS=triton.cdiv(split_k, block_k),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=block_k,
        GROUP_ROWS=tiling.WIDE_GROUP_ROWS,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
