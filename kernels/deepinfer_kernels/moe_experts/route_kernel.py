"""Sorting (token, slot) pairs by expert on the device: tiles of rows that share one expert.

Nothing is read back by the host, and every shape follows the number of pairs alone, so the launches can be captured in
a CUDA graph. The place of a pair inside its expert changes no bit of any row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling


@triton.jit
def _write_tiles(counts, expert, tile_expert_ptr, tile_count_ptr, max_tiles, BLOCK_M: tl.constexpr):
    """List the tiles of every expert one after the other; return the first tile of each."""
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(tiles, axis=0) - tiles
    for index in range(0, tl.max(tiles, axis=0)):
        is_tile = index < tiles
        tl.store(tile_expert_ptr + first + index, expert, mask=is_tile)
        tl.store(tile_count_ptr + first + index, tl.minimum(counts - index * BLOCK_M, BLOCK_M), mask=is_tile)
    total = tl.sum(tiles, axis=0)
    for start in range(0, max_tiles, 1024):
        slot = start + tl.arange(0, 1024)
        tl.store(tile_expert_ptr + slot, -1, mask=(slot >= total) & (slot < max_tiles))
    return first


@triton.jit
def _route_small_kernel(
    topk_idx_ptr,
    count_ptr,
    tile_expert_ptr,
    tile_count_ptr,
    tile_rows_ptr,
    num_pairs,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """All steps in one program. Counters pass through L2, past the processor's own cache."""
    pair = tl.arange(0, PADDED_PAIRS)
    is_pair = pair < num_pairs
    expert = tl.arange(0, PADDED_EXPERTS)
    is_expert = expert < NUM_EXPERTS
    tl.store(count_ptr + expert, 0, mask=is_expert)
    own = tl.load(topk_idx_ptr + pair, mask=is_pair, other=-1)
    is_pair = own >= 0
    tl.debug_barrier()
    rank = tl.atomic_add(count_ptr + own, 1, mask=is_pair)
    tl.debug_barrier()
    counts = tl.load(count_ptr + expert, mask=is_expert, other=0, cache_modifier=".cg")
    first = _write_tiles(counts, expert, tile_expert_ptr, tile_count_ptr, max_tiles, BLOCK_M)
    tl.debug_barrier()
    tl.store(count_ptr + expert, first, mask=is_expert)
    tl.debug_barrier()
    base = tl.load(count_ptr + own, mask=is_pair, other=0, cache_modifier=".cg")
    tl.store(tile_rows_ptr + base * BLOCK_M + rank, pair, mask=is_pair)


@triton.jit
def _rank_kernel(topk_idx_ptr, count_ptr, rank_ptr, num_pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    expert = tl.load(topk_idx_ptr + pair, mask=is_pair, other=-1)
    is_pair = expert >= 0
    rank = tl.atomic_add(count_ptr + expert, 1, mask=is_pair)
    tl.store(rank_ptr + pair, rank, mask=is_pair)


@triton.jit
def _tiles_kernel(
    count_ptr,
    tile_expert_ptr,
    tile_count_ptr,
    first_ptr,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    expert = tl.arange(0, PADDED_EXPERTS)
    counts = tl.load(count_ptr + expert, mask=expert < NUM_EXPERTS, other=0)
    first = _write_tiles(counts, expert, tile_expert_ptr, tile_count_ptr, max_tiles, BLOCK_M)
    tl.store(first_ptr + expert, first, mask=expert < NUM_EXPERTS)


@triton.jit
def _place_kernel(
    topk_idx_ptr, rank_ptr, first_ptr, tile_rows_ptr, num_pairs, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    expert = tl.load(topk_idx_ptr + pair, mask=is_pair, other=-1)
    is_pair = expert >= 0
    base = tl.load(first_ptr + expert, mask=is_pair, other=0)
    rank = tl.load(rank_ptr + pair, mask=is_pair, other=0)
    tl.store(tile_rows_ptr + base * BLOCK_M + rank, pair, mask=is_pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of ``block_m`` rows, each of one expert.

    Attributes:
        expert: [max_tiles] int32, expert of the tile; -1: no tile.
        count: [max_tiles] int32, rows in use, undefined without an expert.
        rows: [max_tiles * block_m] int32, pair of the row: token * top_k + slot; undefined behind ``count``.
    """

    expert: torch.Tensor
    count: torch.Tensor
    rows: torch.Tensor
    block_m: int


def route_pairs(topk_idx: torch.Tensor, num_experts: int, block_m: int) -> Tiles:
    """Sort the pairs of contiguous ``topk_idx`` [num_tokens, top_k] int32 by expert, without those of expert -1."""
    num_pairs, device = topk_idx.numel(), topk_idx.device
    max_tiles = min(num_pairs, num_pairs // block_m + num_experts)
    padded_experts = triton.next_power_of_2(num_experts)

    def integers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    tiles = Tiles(
        expert=integers(max_tiles), count=integers(max_tiles), rows=integers(max_tiles * block_m), block_m=block_m
    )
    first = integers(num_experts)
    if num_pairs <= tiling.ROUTE_ONE_PROGRAM:
        _route_small_kernel[(1,)](
            topk_idx,
            first,
            tiles.expert,
            tiles.count,
            tiles.rows,
            num_pairs,
            max_tiles,
            NUM_EXPERTS=num_experts,
            PADDED_EXPERTS=padded_experts,
            PADDED_PAIRS=max(32, triton.next_power_of_2(num_pairs)),
            BLOCK_M=block_m,
            num_warps=8,
        )
        return tiles
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    rank = integers(num_pairs)
    grid = (triton.cdiv(num_pairs, tiling.ROUTE_BLOCK),)
    _rank_kernel[grid](topk_idx, counts, rank, num_pairs, BLOCK=tiling.ROUTE_BLOCK)
    _tiles_kernel[(1,)](
        counts,
        tiles.expert,
        tiles.count,
        first,
        max_tiles,
        NUM_EXPERTS=num_experts,
        PADDED_EXPERTS=padded_experts,
        BLOCK_M=block_m,
    )
    _place_kernel[grid](topk_idx, rank, first, tiles.rows, num_pairs, BLOCK_M=block_m, BLOCK=tiling.ROUTE_BLOCK)
    return tiles
