"""First product of the experts with everything behind it: gate and up, clamp, SwiGLU, routing weight, MXFP8."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.moe_experts.route_kernel import Tiles
from deepinfer_kernels.swiglu.triton_kernel import clamped_swiglu
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import WEIGHT_SHIFT, load_packed_scale, magnitude_bits, mxfp8_round, unpack_e2m1


@triton.jit
def _experts_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    row_weight_ptr,
    tile_expert_ptr,
    tile_count_ptr,
    tile_rows_ptr,
    h_ptr,
    limit,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    H_WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF_N: tl.constexpr,
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
    pair = tl.load(tile_rows_ptr + tile * BLOCK_M + m, mask=is_row, other=0)
    # The first half of the tile's rows are gate rows of w13, the second half the up rows of the same outputs.
    half = tl.arange(0, BLOCK_N) % HALF_N
    n_row = tl.minimum(tl.program_id(0) * HALF_N + half, INTERMEDIATE - 1)  # outputs behind the end repeat the last
    n_row += tl.arange(0, BLOCK_N) // HALF_N * INTERMEDIATE
    word = tl.arange(0, BLOCK_K // 4)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + expert * (2 * INTERMEDIATE * (K // 4)) + n_row[:, None] * (K // 4) + word[None, :]
    scale_ptrs = scale_ptr + expert * (2 * INTERMEDIATE * (K // 32)) + n_row * (K // 32)
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[None, :] * PADDED_K + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, PADDED_K, BLOCK_K, num_stages=NUM_STAGES):
        if K == PADDED_K:
            words = tl.load(weight_ptrs + start // 4)
        else:
            words = tl.load(weight_ptrs + start // 4, mask=(start // 4 + word < K // 4)[None, :], other=0)
        scale = load_packed_scale(scale_ptrs, start, K, PADDED_K)
        x = tl.load(x_ptrs + start, mask=is_row[None, :], other=0.0) if BLOCK_M <= 32 else tl.load(x_ptrs + start)
        acc = tl.dot(unpack_e2m1(words, scale, BLOCK_N), x, acc)
    rounded = (acc * SHIFT).to(ACTIVATION).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(rounded, [2, HALF_N, BLOCK_M]), (1, 2, 0)))  # [HALF_N, BLOCK_M]
    row_weight = tl.load(row_weight_ptr + pair, mask=is_row, other=0.0)
    h = clamped_swiglu(gate, up, limit) * row_weight[None, :]
    h = h.to(ACTIVATION).to(tl.float32)
    if QUANTIZE:
        blocks = tl.reshape(h, [HALF_N // 32, 32, BLOCK_M])
        amax_bits = tl.max(magnitude_bits(blocks), axis=1)
        h = tl.reshape(mxfp8_round(blocks, amax_bits[:, None, :]), [HALF_N, BLOCK_M])
    # The second product reads h with its columns turned word by word, like every prepared row.
    first_n = tl.program_id(0) * HALF_N
    place = tl.arange(0, HALF_N)
    h = tl.where((first_n + place < INTERMEDIATE)[:, None], h, 0.0).to(h_ptr.dtype.element_ty)
    h = tl.reshape(tl.permute(tl.reshape(h, [HALF_N // 4, 4, BLOCK_M]), (1, 0, 2)), [HALF_N, BLOCK_M])
    if TURNED == BLOCK_K:
        column = first_n // BLOCK_K * BLOCK_K + place // (HALF_N // 4) * (BLOCK_K // 4)
        column += first_n % BLOCK_K // 4 + place % (HALF_N // 4)
        is_stored = is_row[None, :]
    else:
        word = first_n // 4 + place % (HALF_N // 4)
        column = word // (TURNED // 4) * TURNED + place // (HALF_N // 4) * (TURNED // 4) + word % (TURNED // 4)
        is_stored = is_row[None, :] & (column < H_WIDTH)[:, None]
    tl.store(h_ptr + pair.to(tl.int64)[None, :] * H_WIDTH + column[:, None], h, mask=is_stored)


def experts_up(
    rows: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    tiles: Tiles,
    *,
    limit: float,
    activation: torch.dtype,
    quantize: bool,
    tile: MatmulTile,
    turned: int = tiling.WORD_BLOCK_K,
) -> torch.Tensor:
    """Hidden values of every pair for the second product: [pairs, padded intermediate_size] bf16.

    Args:
        rows: [num_tokens, padded hidden_size] bf16, prepared for e2m1 words.
        w13: [num_experts, 2 * intermediate_size, hidden_size / 2] uint8, contiguous.
        w13_scale: [num_experts, 2 * intermediate_size, hidden_size / 32] uint8, contiguous.
        topk_weights: [num_tokens, top_k] fp32, contiguous.
        tiles: the pairs by expert, in tiles of ``tile.rows``.
        limit: of the SwiGLU.
        activation: dtype the products and the SwiGLU round to.
        quantize: round to MXFP8 last.
        tile: of ``tiling.EXPERT_TILES``.
        turned: columns that are turned together, see ``shares.turned_columns``. With fewer than a block nothing is
            padded; with those of a word the columns stay in their order, not quantised, in ``activation``.
    """
    intermediate_size, depth = w13.shape[1] // 2, w13.shape[2] * 2
    width = padded_depth(intermediate_size) if turned == tiling.WORD_BLOCK_K else intermediate_size
    is_plain = turned == tiling.E2M1_CODES
    dtype = activation if is_plain else torch.bfloat16
    h = torch.empty((topk_weights.numel(), width), dtype=dtype, device=rows.device)
    _experts_up_kernel[(triton.cdiv(width, tile.columns // 2), tiles.expert.shape[0])](
        rows,
        w13.view(torch.int16),
        w13_scale,
        topk_weights,
        tiles.expert,
        tiles.count,
        tiles.rows,
        h,
        float(limit),
        TOP_K=topk_weights.shape[1],
        K=depth,
        PADDED_K=rows.shape[1],
        INTERMEDIATE=intermediate_size,
        H_WIDTH=width,
        TURNED=turned,
        ACTIVATION=tl.bfloat16 if activation == torch.bfloat16 else tl.float32,
        QUANTIZE=quantize and not is_plain,
        SHIFT=WEIGHT_SHIFT,
        BLOCK_N=tile.columns,
        HALF_N=tile.columns // 2,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.WORD_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return h
