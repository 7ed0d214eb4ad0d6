"""Second product of the experts: one output row per (token, slot) pair."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.moe_experts.route_kernel import Tiles
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import WEIGHT_SHIFT, load_packed_scale, unpack_e2m1


@triton.jit
def _experts_down_kernel(
    h_ptr,
    weight_ptr,
    scale_ptr,
    tile_expert_ptr,
    tile_count_ptr,
    tile_rows_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    H_WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    m = tl.arange(0, BLOCK_M)
    is_row = m < tl.load(tile_count_ptr + tile)
    # Small tiles are mostly empty: their empty rows are not read. In large ones they repeat pair 0, without a mask.
    pair = tl.load(tile_rows_ptr + tile * BLOCK_M + m, mask=is_row, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n, HIDDEN - 1)  # outputs behind the end repeat the last one
    word = tl.arange(0, BLOCK_K // 4)
    k = tl.arange(0, BLOCK_K)
    if TURNED < BLOCK_K:  # so many columns are turned alone: of each the words with code 0 come first
        code, word_k = k // (BLOCK_K // 4), k % (BLOCK_K // 4)
        k = word_k // (TURNED // 4) * TURNED + code * (TURNED // 4) + word_k % (TURNED // 4)
        k = tl.max_contiguous(tl.multiple_of(k, TURNED // 4), TURNED // 4)  # the compiler does not see it
    weight_ptrs = weight_ptr + expert * (HIDDEN * (K // 4)) + n_row[:, None] * (K // 4) + word[None, :]
    scale_ptrs = scale_ptr + expert * (HIDDEN * (K // 32)) + n_row * (K // 32)
    h_ptrs = h_ptr + pair[None, :] * H_WIDTH + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, PADDED_K, BLOCK_K, num_stages=NUM_STAGES):
        if K == PADDED_K:
            words = tl.load(weight_ptrs + start // 4)
        else:
            words = tl.load(weight_ptrs + start // 4, mask=(start // 4 + word < K // 4)[None, :], other=0)
        scale = load_packed_scale(scale_ptrs, start, K, PADDED_K)
        if H_WIDTH < PADDED_K:
            h = tl.load(h_ptrs + start, mask=is_row[None, :] & (start + k < H_WIDTH)[:, None], other=0.0)
        else:
            h = tl.load(h_ptrs + start, mask=is_row[None, :], other=0.0) if BLOCK_M <= 32 else tl.load(h_ptrs + start)
        acc = tl.dot(unpack_e2m1(words, scale, BLOCK_N), h, acc)
    out_ptrs = out_ptr + pair[None, :] * HIDDEN + n[:, None]
    tl.store(out_ptrs, (acc * SHIFT).to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (n < HIDDEN)[:, None])


def experts_down(
    h: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    tiles: Tiles,
    *,
    out_dtype: torch.dtype,
    tile: MatmulTile,
    turned: int = tiling.WORD_BLOCK_K,
) -> torch.Tensor:
    """Multiply the hidden values [pairs, padded intermediate_size] with w2 of their expert: [pairs, hidden_size].

    Args:
        h: as ``experts_up`` returns it.
        w2: [num_experts, hidden_size, intermediate_size / 2] uint8, contiguous.
        w2_scale: [num_experts, hidden_size, intermediate_size / 32] uint8, contiguous.
        tiles: the pairs by expert, in tiles of ``tile.rows``.
        out_dtype: bf16 or fp32; rounded once.
        tile: of ``tiling.EXPERT_DOWN_TILES``.
        turned: columns of ``h`` that are turned together; with fewer than a block ``h`` is not padded.
    """
    hidden_size, depth = w2.shape[1], w2.shape[2] * 2
    out = torch.empty((h.shape[0], hidden_size), dtype=out_dtype, device=h.device)
    _experts_down_kernel[(triton.cdiv(hidden_size, tile.columns), tiles.expert.shape[0])](
        h,
        w2.view(torch.int16),
        w2_scale,
        tiles.expert,
        tiles.count,
        tiles.rows,
        out,
        HIDDEN=hidden_size,
        K=depth,
        PADDED_K=padded_depth(depth),
        H_WIDTH=h.shape[1],
        TURNED=turned,
        SHIFT=WEIGHT_SHIFT,
        BLOCK_N=tile.columns,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.WORD_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
