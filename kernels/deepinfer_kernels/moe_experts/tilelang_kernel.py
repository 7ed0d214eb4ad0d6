"""The routed experts in TileLang: both products on MXFP4 weights, unpacked to bf16 in shared memory.

Routing and the rows come from the same kernels as in the Triton set. A program owns the rows of one tile, all of one
expert, and 128 rows of the weight: of the first product 64 gate rows and the 64 up rows of the same outputs. Columns
are walked in ascending blocks of 128, inside a block code 0 of every 16-bit word first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="valid-type, name-defined, index, misc, no-any-return"
from typing import Any

import tilelang
import tilelang.language as T
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import from_table
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.triton_kernel import packed_operand
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.moe_experts.route_kernel import route_pairs
from deepinfer_kernels.moe_experts.shares import Gather, all_turned_columns, turned_columns
from deepinfer_kernels.tilelang_formats import (
    as_int,
    keep_nan_between,
    mxfp8_exponent,
    mxfp8_round,
    scaled_pair,
    turned_pair,
    weight_factor,
)
from deepinfer_kernels.tilelang_options import PASSES
from deepinfer_kernels.triton_formats import WEIGHT_SHIFT

_BLOCK_K = tiling.WORD_BLOCK_K
_COLUMNS = tiling.EXPERT_TILELANG_COLUMNS
_HALF = _COLUMNS // 2
_THREADS = tiling.EXPERT_TILELANG_THREADS
_UNITS = _BLOCK_K // 32  # loads of 16 bytes of one weight row in a block of columns; each has one scale
_STEPS = _COLUMNS * _UNITS // _THREADS


def weight_row(row: Any, first: Any, second: Any, first_end: Any, second_end: Any) -> Any:
    """Row of the weight for ``row`` of a tile: ``first`` ... + 63, then ``second`` ... + 63.

    A row behind its end repeats the last one before it: nothing reads its results, but it is loaded.
    """
    low, high = T.min(first + row, first_end - 1), T.min(second + row - _HALF, second_end - 1)
    return T.if_then_else(row < _HALF, low, high)


@T.macro
def _unpack_weights(weight, scale, weights, expert, first, second, first_end, second_end, start, depth):
    """Rows of the weight as ``weight_row`` says, columns ``start`` ... + 127, as bf16; zero from ``depth`` on."""
    lane = T.get_thread_binding(0)
    words = T.alloc_local((4,), T.int32)
    packed = T.alloc_local((4,), T.int32)
    values = T.view(packed, (8,), T.bfloat16)
    factor = T.alloc_var(T.int32)
    for step in T.unroll(_STEPS):
        row = (step * _THREADS + lane) // _UNITS
        unit = (step * _THREADS + lane) % _UNITS
        n = weight_row(row, first, second, first_end, second_end)
        if start + unit * 32 < depth:
            for v in T.vectorized(4):
                words[v] = weight[expert, n, start // 8 + unit * 4 + v]
            factor = scale[expert, n, start // 32 + unit]
            factor = weight_factor(factor)
            for code in T.unroll(4):
                for word in T.unroll(4):
                    packed[word] = scaled_pair(turned_pair(words[word], code), factor)
                for v in T.vectorized(8):
                    weights[row, code * 32 + unit * 8 + v] = values[v]
        else:
            for code in T.unroll(4):
                for v in T.vectorized(8):
                    weights[row, code * 32 + unit * 8 + v] = T.bfloat16(0)


@T.macro
def _gather_rows(source, rows, x, count, start, block_m):
    """Columns ``start`` ... + 127 of the rows of one tile; rows behind ``count`` are zero."""
    for m, k in T.Parallel(block_m, _BLOCK_K):
        if m < count:
            x[m, k] = source[rows[m], start + k]
        else:
            x[m, k] = T.bfloat16(0)


@T.macro
def _gather_turned_rows(source, rows, x, count, start, width, turned, block_m):
    """The same of rows whose columns are turned ``turned`` at a time, and not filled up behind ``width``."""
    for m, k in T.Parallel(block_m, _BLOCK_K):
        # of a column: its code, and its word among those of the block
        code, word = k // (_BLOCK_K // 4), k % (_BLOCK_K // 4)
        place = word // (turned // 4) * turned + code * (turned // 4) + word % (turned // 4)
        if m < count and start + place < width:
            x[m, k] = source[rows[m], start + place]
        else:
            x[m, k] = T.bfloat16(0)


@T.macro
def _activate(product, hidden, rows, row_weight, count, limit, is_bf16, block_m):
    """SwiGLU of the products [columns, rows], times the routing weight: [rows, outputs], in fp32."""
    for m, n in T.Parallel(block_m, _HALF):
        gate = T.alloc_var(T.float32)
        up = T.alloc_var(T.float32)
        bound = T.alloc_var(T.float32)
        gate = _rounded(product[n, m] * T.float32(WEIGHT_SHIFT), is_bf16)
        up = _rounded(product[_HALF + n, m] * T.float32(WEIGHT_SHIFT), is_bf16)
        bound = T.if_then_else(limit > 0.0, limit, T.infinity(T.float32))
        gate = keep_nan_between(gate, -T.infinity(T.float32), bound)
        up = keep_nan_between(up, -bound, bound)
        if m < count:
            silu = T.ieee_fdiv(gate, T.exp(-gate) + 1.0)
            hidden[m, n] = _rounded(silu * up * row_weight[rows[m]], is_bf16)
        else:
            hidden[m, n] = 0.0


def _turned_place(column, code, turned):
    """Where ``code`` of the 8 words from ``column`` on is, if so many columns are turned together."""
    return column // turned * turned + code * (turned // 4) + column % turned // 4


def _rows_to_write(count, column, intermediate, turned):
    """Rows of a tile of ``count``, or none where 32 columns from ``column`` on are not there. Blocks are filled up."""
    return count if turned == _BLOCK_K else T.if_then_else(column < intermediate, count, 0)


@T.macro
def _store_hidden(hidden, rows, h, first, count, intermediate, quantize, turned, block_m):
    """Round to MXFP8 and write the columns, ``turned`` of them turned together; a thread owns 32 outputs a turn."""
    lane = T.get_thread_binding(0)
    values = T.alloc_local((8,), T.bfloat16)
    exponent = T.alloc_var(T.int32)
    for step in T.serial(T.ceildiv(2 * block_m, _THREADS)):
        m = (step * _THREADS + lane) // 2
        block = (step * _THREADS + lane) % 2
        if m < _rows_to_write(count, first + block * 32, intermediate, turned):
            if quantize:
                exponent = 0
                for e in T.serial(32):
                    exponent = T.max(exponent, as_int(hidden[m, block * 32 + e]) & 0x7FFFFFFF)
                exponent = mxfp8_exponent(exponent)
            for code in T.unroll(4):
                for word in T.unroll(8):
                    value = hidden[m, block * 32 + word * 4 + code]
                    rounded = mxfp8_round(value, exponent) if quantize else value
                    is_output = first + block * 32 + word * 4 + code < intermediate
                    values[word] = T.if_then_else(is_output, T.Cast(T.bfloat16, rounded), T.bfloat16(0))
                place = _turned_place(first + block * 32, code, turned)
                for v in T.vectorized(8):
                    h[rows[m], place + v] = values[v]


@T.macro
def _store_in_order(hidden, rows, h, first, count, intermediate, dtype, block_m):
    """Write the columns as they are; the ranks have too few for a scale of MXFP8."""
    for m, n in T.Parallel(block_m, _HALF):
        if m < count and first + n < intermediate:
            h[rows[m], first + n] = T.Cast(dtype, hidden[m, n])


def _rounded(value, is_bf16):
    """``value`` rounded to the dtype of the activations."""
    return T.Cast(T.float32, T.Cast(T.bfloat16, value)) if is_bf16 else value


@tilelang.jit(pass_configs=PASSES)
def experts_up_kernel(depth, intermediate, top_k, is_bf16, quantize, block_m, turned=_BLOCK_K):
    """First product and everything behind it, for ``block_m`` rows of one expert; ``turned`` as in ``shares``."""
    num_tokens, num_experts, num_tiles = T.dynamic("num_tokens"), T.dynamic("num_experts"), T.dynamic("num_tiles")
    num_pairs = T.dynamic("num_pairs")
    width = padded_depth(depth)
    hidden_width = padded_depth(intermediate) if turned == _BLOCK_K else intermediate
    is_plain = turned == tiling.E2M1_CODES
    h_dtype = T.float32 if is_plain and not is_bf16 else T.bfloat16

    @T.prim_func
    def experts_up_tile(
        x: T.Tensor((num_tokens, width), T.bfloat16),
        weight: T.Tensor((num_experts, 2 * intermediate, depth // 8), T.int32),
        scale: T.Tensor((num_experts, 2 * intermediate, depth // 32), T.uint8),
        row_weight: T.Tensor((num_pairs,), T.float32),
        tile_expert: T.Tensor((num_tiles,), T.int32),
        tile_count: T.Tensor((num_tiles,), T.int32),
        tile_rows: T.Tensor((num_tiles, block_m), T.int32),
        h: T.Tensor((num_pairs, hidden_width), h_dtype),
        limit: T.float32,
    ):
        with T.Kernel(T.ceildiv(hidden_width, _HALF), num_tiles, threads=_THREADS) as (part, tile):
            weights = T.alloc_shared((_COLUMNS, _BLOCK_K), T.bfloat16)
            x_shared = T.alloc_shared((block_m, _BLOCK_K), T.bfloat16)
            rows = T.alloc_shared((block_m,), T.int32)
            sources = T.alloc_shared((block_m,), T.int32)
            product = T.alloc_shared((_COLUMNS, block_m), T.float32)
            hidden = T.alloc_shared((block_m, _HALF), T.float32)
            total = T.alloc_fragment((_COLUMNS, block_m), T.float32)
            expert = tile_expert[tile]
            if expert >= 0:
                count = tile_count[tile]
                first = part * _HALF
                for m in T.Parallel(block_m):
                    rows[m] = tile_rows[tile, m]
                    sources[m] = tile_rows[tile, m] // top_k
                T.clear(total)
                for block in T.serial(width // _BLOCK_K):
                    start = block * _BLOCK_K
                    _gather_rows(x, sources, x_shared, count, start, block_m)
                    second = intermediate + first
                    ends = intermediate, 2 * intermediate
                    _unpack_weights(weight, scale, weights, expert, first, second, *ends, start, depth)
                    T.fence_proxy_async()
                    T.gemm(weights, x_shared, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(total, product)
                _activate(product, hidden, rows, row_weight, count, limit, is_bf16, block_m)
                if is_plain:
                    _store_in_order(hidden, rows, h, first, count, intermediate, h_dtype, block_m)
                else:
                    _store_hidden(hidden, rows, h, first, count, intermediate, quantize, turned, block_m)

    return experts_up_tile


@tilelang.jit(pass_configs=PASSES)
def experts_down_kernel(depth, hidden_size, is_bf16, block_m, turned=_BLOCK_K):
    """Second product, for ``block_m`` rows of one expert; ``turned`` columns of ``h`` are turned together."""
    num_pairs, num_experts, num_tiles = T.dynamic("num_pairs"), T.dynamic("num_experts"), T.dynamic("num_tiles")
    width = padded_depth(depth)
    h_width = width if turned == _BLOCK_K else depth
    out_dtype = T.bfloat16 if is_bf16 else T.float32

    @T.prim_func
    def experts_down_tile(
        h: T.Tensor((num_pairs, h_width), T.bfloat16),
        weight: T.Tensor((num_experts, hidden_size, depth // 8), T.int32),
        scale: T.Tensor((num_experts, hidden_size, depth // 32), T.uint8),
        tile_expert: T.Tensor((num_tiles,), T.int32),
        tile_count: T.Tensor((num_tiles,), T.int32),
        tile_rows: T.Tensor((num_tiles, block_m), T.int32),
        out: T.Tensor((num_pairs, hidden_size), out_dtype),
    ):
        with T.Kernel(T.ceildiv(hidden_size, _COLUMNS), num_tiles, threads=_THREADS) as (part, tile):
            weights = T.alloc_shared((_COLUMNS, _BLOCK_K), T.bfloat16)
            h_shared = T.alloc_shared((block_m, _BLOCK_K), T.bfloat16)
            rows = T.alloc_shared((block_m,), T.int32)
            product = T.alloc_shared((_COLUMNS, block_m), T.float32)
            total = T.alloc_fragment((_COLUMNS, block_m), T.float32)
            expert = tile_expert[tile]
            if expert >= 0:
                count = tile_count[tile]
                first = part * _COLUMNS
                for m in T.Parallel(block_m):
                    rows[m] = tile_rows[tile, m]
                T.clear(total)
                for block in T.serial(width // _BLOCK_K):
                    start = block * _BLOCK_K
                    if turned == _BLOCK_K:
                        _gather_rows(h, rows, h_shared, count, start, block_m)
                    else:
                        _gather_turned_rows(h, rows, h_shared, count, start, h_width, turned, block_m)
                    ends = hidden_size, hidden_size
                    _unpack_weights(weight, scale, weights, expert, first, first + _HALF, *ends, start, depth)
                    T.fence_proxy_async()
                    T.gemm(weights, h_shared, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(total, product)
                for m, n in T.Parallel(block_m, _COLUMNS):
                    if m < count and first + n < hidden_size:
                        out[rows[m], first + n] = T.Cast(out_dtype, product[n, m] * T.float32(WEIGHT_SHIFT))

    return experts_down_tile


def moe_experts_tilelang(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    rows: torch.Tensor | None,
    *,
    limit: float,
    quantize_input: bool,
    num_shares: int = 1,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Run arguments ``moe_experts`` has already checked; fp32 ``x`` only with ``quantize_input``."""
    num_tokens, top_k = topk_idx.shape
    num_experts, num_outputs, own, depth = w2.shape[0], w2.shape[1], w13.shape[1] // 2, w2.shape[2] * 2
    out = torch.empty((num_tokens * top_k, num_outputs), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out.view(num_tokens, top_k, num_outputs)
    average = -(-num_tokens * top_k // (num_experts * num_shares))
    block_m = from_table(tiling.EXPERT_TILELANG_ROWS, average)
    tiles = route_pairs(topk_idx.contiguous(), num_experts, block_m)
    of_tiles = (tiles.expert, tiles.count, tiles.rows.view(-1, block_m))
    if rows is None:
        rows = prepare_rows(x, codes=tiling.E2M1_CODES, quantize=quantize_input)
    is_bf16, turned = x.dtype == torch.bfloat16, turned_columns(own, gather)
    h = torch.empty(
        (num_tokens * top_k, padded_depth(own) if turned == _BLOCK_K else own),
        dtype=x.dtype if turned == tiling.E2M1_CODES else torch.bfloat16,
        device=x.device,
    )
    experts_up_kernel(x.shape[1], own, top_k, is_bf16, quantize_input, block_m, turned)(
        rows,
        packed_operand(w13).view(torch.int32),
        packed_operand(w13_scale),
        topk_weights.contiguous().view(-1),
        *of_tiles,
        h,
        float(limit),
    )
    h, turned = all_turned_columns(h, depth, gather, turned, quantize=quantize_input)
    experts_down_kernel(depth, num_outputs, is_bf16, block_m, turned)(
        h, packed_operand(w2).view(torch.int32), packed_operand(w2_scale), *of_tiles, out
    )
    return out.view(num_tokens, top_k, num_outputs)
