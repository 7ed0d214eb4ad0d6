"""Rows of activations as the unpacked weights meet them: quantised if asked, bf16, columns turned word by word."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs
from deepinfer_kernels.launching import as_rows
from deepinfer_kernels.linear.parts_kernel import load_product
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.triton_formats import magnitude_bits, mxfp8_round


@triton.jit
def turned(values, SIZE: tl.constexpr, CODES: tl.constexpr):
    """bf16 of one row [SIZE], SIZE a multiple of 128: of every 128 columns code 0 of all words first."""
    words = tl.reshape(values.to(tl.bfloat16), [SIZE // 128, 128 // CODES, CODES])
    return tl.reshape(tl.permute(words, (0, 2, 1)), [SIZE])


@triton.jit
def mxfp8_values(values, SIZE: tl.constexpr):
    """One fp32 row [SIZE] rounded to MXFP8, 32 columns to a scale."""
    blocks = tl.reshape(values, [SIZE // 32, 32])
    return tl.reshape(mxfp8_round(blocks, tl.max(magnitude_bits(blocks), axis=1)[:, None]), [SIZE])


@triton.jit(do_not_specialize=["num_rows", "part_stride"])
def _prepare_rows_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    x_stride_m,
    part_stride,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    CODES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_row = (row < num_rows)[:, None]
    x_ptrs = x_ptr + row[:, None] * x_stride_m + column[None, :]
    x = load_product(x_ptrs, part_stride, is_row & (column < K)[None, :], NUM_PARTS, DTYPE)
    if QUANTIZE:
        blocks = tl.reshape(x, [ROWS, BLOCK_K // 32, 32])
        amax_bits = tl.max(magnitude_bits(blocks), axis=2)
        x = tl.reshape(mxfp8_round(blocks, amax_bits[:, :, None]), [ROWS, BLOCK_K])
    words = tl.reshape(x.to(tl.bfloat16), [ROWS, BLOCK_K // CODES, CODES])
    turned = tl.reshape(tl.permute(words, (0, 2, 1)), [ROWS, BLOCK_K])
    tl.store(out_ptr + row[:, None] * PADDED_K + column[None, :], turned, mask=is_row)


def prepare_rows(x: torch.Tensor, *, codes: int, quantize: bool) -> torch.Tensor:
    """Turn the columns of every WORD_BLOCK_K so that code r of all words comes before code r + 1; zeros behind K.

    Args:
        x: [..., K] bf16, or fp32 if ``quantize``: MXFP8 values are exact in bf16.
        codes: codes in a 16-bit word of the weight.
        quantize: round to MXFP8 first.

    Returns:
        [rows, padded_depth(K)] bf16, a new tensor.
    """
    rows = as_rows(x)
    return _prepare(rows, 1, x.dtype, rows.stride(0), 0, codes, quantize)


def prepare_parts(parts: torch.Tensor, *, dtype: torch.dtype, codes: int, quantize: bool) -> torch.Tensor:
    """The same of a product [parts, M, K] whose parts are still to be added, and rounded to ``dtype``."""
    return _prepare(parts[0], parts.shape[0], dtype, parts.stride(1), parts.stride(0), codes, quantize)


def _prepare(
    rows: torch.Tensor,
    num_parts: int,
    dtype: torch.dtype,
    row_stride: int,
    part_stride: int,
    codes: int,
    quantize: bool,
) -> torch.Tensor:
    num_rows, depth = rows.shape
    early = starts_early(rows.device)
    width = padded_depth(depth)
    out = torch.empty((num_rows, width), dtype=torch.bfloat16, device=rows.device)
    if num_rows > 0:
        grid = (triton.cdiv(num_rows, tiling.PREPARE_ROWS), width // tiling.WORD_BLOCK_K)
        _prepare_rows_kernel[grid](
            rows,
            out,
            num_rows,
            row_stride,
            part_stride,
            K=depth,
            PADDED_K=width,
            CODES=codes,
            QUANTIZE=quantize,
            NUM_PARTS=num_parts,
            DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            ROWS=tiling.PREPARE_ROWS,
            BLOCK_K=tiling.WORD_BLOCK_K,
            IS_EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out
