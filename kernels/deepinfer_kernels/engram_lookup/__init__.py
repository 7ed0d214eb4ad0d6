"""Engram lookup: read and dequantise the table rows of every token."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.engram_lookup.reference import engram_lookup_reference
from deepinfer_kernels.engram_lookup.triton_kernel import engram_lookup_triton
from deepinfer_kernels.tiling import MX_BLOCK


def engram_lookup(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate the dequantised table rows of each token in column order.

    Args:
        table: [num_rows, width] float8_e4m3fn, width a multiple of 32, any strides.
        scale: [num_rows, width / 32] uint8, the raw E8M0 bytes, one per 32 columns of a row.
        rows: [num_tokens, num_columns] int32, from ``engram_rows``; 0 ... num_rows - 1.
        dtype: dtype of the result, bf16 or fp32.

    Returns:
        [num_tokens, num_columns * width] in ``dtype``, a new tensor; code times power of two, exact in both dtypes
        unless the product leaves the range of bf16.

    Raises:
        ShapeError: the shapes do not fit together.
        UnsupportedError: a dtype is not the one above.
        IndexError: on CPU, a row lies outside the table.

    Invariance: bitwise per row; a row depends on the table rows it names only.
    Source: REF, class Engram; spec 2.9 and 5.2.
    """
    checks.require_dtype("engram_lookup", "table", table, (torch.float8_e4m3fn,))
    checks.require_dtype("engram_lookup", "scale", scale, (torch.uint8,))
    checks.require_dtype("engram_lookup", "rows", rows, (torch.int32,))
    checks.require_out_dtype("engram_lookup", "dtype", dtype)
    checks.require_rank("engram_lookup", "table", table, 2, "[num_rows, width]")
    checks.require_rank("engram_lookup", "rows", rows, 2, "[num_tokens, num_columns]")
    checks.require_multiple("engram_lookup", "table", table, MX_BLOCK)
    expected = (table.shape[0], table.shape[1] // MX_BLOCK)
    checks.require_shape("engram_lookup", "scale", scale, expected, "table has one scale per 32 columns of a row")
    if use_triton(rows) and table.stride(1) == 1 and scale.stride(1) == 1:
        return engram_lookup_triton(table, scale, rows, dtype)
    return engram_lookup_reference(table, scale, rows, dtype)
