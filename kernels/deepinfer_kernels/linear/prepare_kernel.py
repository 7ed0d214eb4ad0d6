"""Rows of activations as the unpacked weights meet them: quantised if asked, bf16, columns turned word by word."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import as_rows
from deepinfer_kernels.triton_formats import magnitude_bits, mxfp8_round


@triton.jit
def _prepare_rows_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    x_stride_m,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    CODES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    is_row = (row < num_rows)[:, None]
    x_ptrs = x_ptr + row[:, None] * x_stride_m + column[None, :]
    x = tl.load(x_ptrs, mask=is_row & (column < K)[None, :], other=0.0).to(tl.float32)
    if QUANTIZE:
        blocks = tl.reshape(x, [ROWS, BLOCK_K // 32, 32])
        amax_bits = tl.max(magnitude_bits(blocks), axis=2)
        x = tl.reshape(mxfp8_round(blocks, amax_bits[:, :, None]), [ROWS, BLOCK_K])
    words = tl.reshape(x.to(tl.bfloat16), [ROWS, BLOCK_K // CODES, CODES])
    turned = tl.reshape(tl.permute(words, (0, 2, 1)), [ROWS, BLOCK_K])
    tl.store(out_ptr + row[:, None] * PADDED_K + column[None, :], turned, mask=is_row)


def padded_depth(depth: int) -> int:
    """K filled up to whole blocks of words."""
    return -(-depth // tiling.WORD_BLOCK_K) * tiling.WORD_BLOCK_K


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
    num_rows, depth = rows.shape
    width = padded_depth(depth)
    out = torch.empty((num_rows, width), dtype=torch.bfloat16, device=x.device)
    if num_rows > 0:
        grid = (triton.cdiv(num_rows, tiling.PREPARE_ROWS), width // tiling.WORD_BLOCK_K)
        _prepare_rows_kernel[grid](
            rows,
            out,
            num_rows,
            rows.stride(0),
            K=depth,
            PADDED_K=width,
            CODES=codes,
            QUANTIZE=quantize,
            ROWS=tiling.PREPARE_ROWS,
            BLOCK_K=tiling.WORD_BLOCK_K,
            num_warps=4,
        )
    return out
