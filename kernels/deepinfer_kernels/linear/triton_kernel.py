"""Linear layers on an NVIDIA GPU: which kernel and which tile a call takes.

Every path of one weight walks K in one order, so the number of rows chooses the path but no bit of the result.
"""

from collections.abc import Sequence

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.linear.exact_kernel import exact_matmul
from deepinfer_kernels.linear.mxfp8_kernel import mxfp8_narrow_parts
from deepinfer_kernels.linear.parts_kernel import add_parts
from deepinfer_kernels.linear.plain_kernel import plain_narrow
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.reference import dequantize_blocks_reference
from deepinfer_kernels.linear.unpack_kernel import unpack_weight
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.linear.wide_kernel import is_wide_operand, wide_matmul
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import WEIGHT_SHIFT

_ALIGNMENT_BYTES = 16


def tile_for(table: Sequence[tuple[int, MatmulTile]], num_rows: int) -> MatmulTile:
    """Tile of the first entry whose limit is not below ``num_rows``."""
    return next(tile for limit, tile in table if num_rows <= limit)


def split_width(num_out: int, depth: int) -> int:
    """Width of the parts in which the sum over K is cut; follows the shape of the whole weight, never the rows."""
    return next((width for outputs, k, width in tiling.SPLIT_K_BY_SHAPE if num_out < outputs and depth <= k), depth)


def _is_narrow(num_rows: int, num_out: int) -> bool:
    return num_rows <= next(rows for limit, rows in tiling.NARROW_ROWS_BY_OUTPUTS if num_out < limit)


def packed_operand(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` or its scales as the kernels read them: contiguous, in words of 2 and 4 bytes."""
    weight = weight.detach().contiguous()
    return weight if weight.data_ptr() % _ALIGNMENT_BYTES == 0 else weight.clone()


def _wide_tile(num_rows: int, split_k: int, depth: int) -> MatmulTile:
    return tile_for(tiling.WIDE_SPLIT_TILES if split_k < depth else tiling.WIDE_TILES, num_rows)


def linear_triton(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, num_shards: int = 1) -> torch.Tensor:
    """Multiply arguments ``linear`` has already checked."""
    num_rows, num_out = x.shape[0], weight.shape[0]
    if num_rows == 0 or num_out == 0:
        return torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    x, weight = last_axis_contiguous(x), last_axis_contiguous(weight.detach())
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return exact_matmul(x, weight, out_dtype)
    split_k = split_width(num_out * num_shards, x.shape[1])
    if not _is_narrow(num_rows, num_out) and is_wide_operand(x) and is_wide_operand(weight):
        return wide_matmul(x, weight, 1, out_dtype, _wide_tile(num_rows, split_k, x.shape[1]), split_k)
    tiles = tiling.PLAIN_TILES if num_out < tiling.PLAIN_LARGE_OUTPUTS else tiling.PLAIN_LARGE_TILES
    return plain_narrow(x, weight, out_dtype, tile_for(tiles, num_rows), split_k)


def mxfp8_parts(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    num_shards: int = 1,
) -> torch.Tensor:
    """Prepared ``rows`` [M, G * padded K] times the groups of ``weight`` [G * N, K]: [parts, M, G * N].

    Several parts are fp32, to be added in ascending order from zero and rounded; one part is of ``out_dtype``.
    """
    num_rows, depth = rows.shape[0], rows.shape[1] // num_groups
    # Rows as narrow as the weight pass the checks of an operation, which fp32 rows are meant for; the kernels, which
    # read whole blocks of words, would read beyond the weight.
    assert rows.shape[1] == num_groups * padded_depth(weight.shape[1]), (rows.shape, num_groups, weight.shape)
    split_k = split_width(weight.shape[0] * num_shards, depth)
    if not _is_narrow(num_rows, weight.shape[0]):
        tile = _wide_tile(num_rows, split_k, depth)
        dense = unpack_weight(weight, scale)
        return wide_matmul(rows, dense, num_groups, out_dtype, tile, split_k, shift=WEIGHT_SHIFT)[None]
    tile = tile_for(tiling.MXFP8_SPLIT_TILES if split_k < depth else tiling.MXFP8_TILES, num_rows)
    return mxfp8_narrow_parts(rows, weight, scale, num_groups, out_dtype, tile, split_k)


def prepared_parts(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    num_groups: int = 1,
    num_shards: int = 1,
) -> torch.Tensor:
    """The same for any rows that an operation prepared: fp32 rows are as they were, and take fp32 products."""
    if rows.shape[0] == 0 or weight.shape[0] == 0:
        return torch.empty((1, rows.shape[0], weight.shape[0]), dtype=out_dtype, device=rows.device)
    weight, scale = packed_operand(weight), packed_operand(scale)
    if rows.dtype == torch.float32:
        return exact_matmul(rows, dequantize_blocks_reference(weight, scale, rows.dtype), out_dtype)[None]
    return mxfp8_parts(rows, weight, scale, num_groups, out_dtype, num_shards)


def mxfp8_prepared_triton(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype, num_shards: int = 1
) -> torch.Tensor:
    """Multiply arguments ``mxfp8_prepared_linear`` has already checked."""
    return add_parts(prepared_parts(rows, weight, scale, out_dtype, num_shards=num_shards), out_dtype)


def _grouped_mxfp8(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    num_groups: int,
    out_dtype: torch.dtype,
    num_shards: int,
) -> torch.Tensor:
    """The same, added and rounded: [M, G * N]."""
    return add_parts(mxfp8_parts(rows, weight, scale, num_groups, out_dtype, num_shards), out_dtype)


def mxfp8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    quantize_input: bool,
    num_shards: int = 1,
) -> torch.Tensor:
    """Multiply arguments ``mxfp8_linear`` has already checked."""
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    weight, scale = packed_operand(weight), packed_operand(scale)
    if x.dtype == torch.float32 and not quantize_input:
        return exact_matmul(last_axis_contiguous(x), dequantize_blocks_reference(weight, scale, x.dtype), out_dtype)
    rows = prepare_rows(x, codes=tiling.E4M3_CODES, quantize=quantize_input)
    return _grouped_mxfp8(rows, weight, scale, 1, out_dtype, num_shards)


def grouped_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype, num_shards: int = 1
) -> torch.Tensor:
    """Multiply arguments ``grouped_linear`` has already checked."""
    num_rows, num_groups, _ = x.shape
    shape = (num_rows, num_groups, weight.shape[0] // num_groups)
    if num_rows == 0 or weight.shape[0] == 0:
        return torch.empty(shape, dtype=out_dtype, device=x.device)
    weight, scale = packed_operand(weight), packed_operand(scale)
    if x.dtype == torch.float32:
        dense = dequantize_blocks_reference(weight, scale, x.dtype).chunk(num_groups)
        parts = [exact_matmul(last_axis_contiguous(x[:, g]), dense[g], out_dtype) for g in range(num_groups)]
        return torch.stack(parts, dim=1)
    rows = prepare_rows(x, codes=tiling.E4M3_CODES, quantize=False).view(num_rows, -1)
    return _grouped_mxfp8(rows, weight, scale, num_groups, out_dtype, num_shards).view(shape)
