"""First product of the experts with everything behind it: gate and up, clamp, SwiGLU, routing weight, MXFP8."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.prepare_kernel import padded_depth
from deepinfer_kernels.moe_experts.route_kernel import Tiles
from deepinfer_kernels.swiglu.triton_kernel import clamped_swiglu
from deepinfer_kernels.tiling import MatmulTile
from deepinfer_kernels.triton_formats import magnitude_bits, mxfp8_round, spread_scale, unpack_e2m1


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
    PADDED_INTERMEDIATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZE: tl.constexpr,
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
    pair = tl.load(tile_rows_ptr + tile * BLOCK_M + m, mask=is_row, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n, INTERMEDIATE - 1)  # outputs behind the end repeat the last one
    word = tl.arange(0, BLOCK_K // 4)
    block = tl.arange(0, BLOCK_K // 32)
    gate_ptrs = weight_ptr + expert * (2 * INTERMEDIATE * (K // 4)) + n_row[:, None] * (K // 4) + word[None, :]
    gate_scale_ptrs = scale_ptr + expert * (2 * INTERMEDIATE * (K // 32)) + n_row[:, None] * (K // 32) + block[None, :]
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[None, :] * PADDED_K + word[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, PADDED_K, BLOCK_K, num_stages=NUM_STAGES):
        gate_word_ptrs = gate_ptrs + start // 4
        gate_byte_ptrs = gate_scale_ptrs + start // 32
        if K == PADDED_K:
            gate_words = tl.load(gate_word_ptrs)
            gate_scale = tl.load(gate_byte_ptrs)
            up_words = tl.load(gate_word_ptrs + INTERMEDIATE * (K // 4))
            up_scale = tl.load(gate_byte_ptrs + INTERMEDIATE * (K // 32))
        else:
            is_word = (start // 4 + word < K // 4)[None, :]
            is_block = (start // 32 + block < K // 32)[None, :]
            gate_words = tl.load(gate_word_ptrs, mask=is_word, other=0)
            gate_scale = tl.load(gate_byte_ptrs, mask=is_block, other=0)
            up_words = tl.load(gate_word_ptrs + INTERMEDIATE * (K // 4), mask=is_word, other=0)
            up_scale = tl.load(gate_byte_ptrs + INTERMEDIATE * (K // 32), mask=is_block, other=0)
        x0 = tl.load(x_ptrs + start)
        x1 = tl.load(x_ptrs + (start + BLOCK_K // 4))
        x2 = tl.load(x_ptrs + (start + BLOCK_K // 2))
        x3 = tl.load(x_ptrs + (start + BLOCK_K // 4 * 3))
        w0, w1, w2, w3 = unpack_e2m1(gate_words, spread_scale(gate_scale, BLOCK_N, BLOCK_K // 32, 8))
        gate = tl.dot(w0, x0, gate)
        gate = tl.dot(w1, x1, gate)
        gate = tl.dot(w2, x2, gate)
        gate = tl.dot(w3, x3, gate)
        v0, v1, v2, v3 = unpack_e2m1(up_words, spread_scale(up_scale, BLOCK_N, BLOCK_K // 32, 8))
        up = tl.dot(v0, x0, up)
        up = tl.dot(v1, x1, up)
        up = tl.dot(v2, x2, up)
        up = tl.dot(v3, x3, up)
    row_weight = tl.load(row_weight_ptr + pair, mask=is_row, other=0.0)
    gate_rounded, up_rounded = gate.to(ACTIVATION).to(tl.float32), up.to(ACTIVATION).to(tl.float32)
    h = clamped_swiglu(gate_rounded, up_rounded, limit) * row_weight[None, :]
    h = h.to(ACTIVATION).to(tl.float32)
    if QUANTIZE:
        blocks = tl.reshape(h, [BLOCK_N // 32, 32, BLOCK_M])
        amax_bits = tl.max(magnitude_bits(blocks), axis=1)
        h = tl.reshape(mxfp8_round(blocks, amax_bits[:, None, :]), [BLOCK_N, BLOCK_M])
    # The second product reads h with its columns turned word by word, like every prepared row.
    h = tl.where((n < INTERMEDIATE)[:, None], h, 0.0).to(tl.bfloat16)
    h = tl.reshape(tl.permute(tl.reshape(h, [BLOCK_N // 4, 4, BLOCK_M]), (1, 0, 2)), [BLOCK_N, BLOCK_M])
    first_n = tl.program_id(0) * BLOCK_N
    place = tl.arange(0, BLOCK_N)
    column = first_n // BLOCK_K * BLOCK_K + place // (BLOCK_N // 4) * (BLOCK_K // 4)
    column += first_n % BLOCK_K // 4 + place % (BLOCK_N // 4)
    h_ptrs = h_ptr + pair.to(tl.int64)[None, :] * PADDED_INTERMEDIATE + column[:, None]
    tl.store(h_ptrs, h, mask=is_row[None, :])


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
) -> torch.Tensor:
    """Hidden values of every pair, ready for the second product: [pairs, padded intermediate_size] bf16.

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
    """
    intermediate_size, depth = w13.shape[1] // 2, w13.shape[2] * 2
    width = padded_depth(intermediate_size)
    h = torch.empty((topk_weights.numel(), width), dtype=torch.bfloat16, device=rows.device)
    _experts_up_kernel[(triton.cdiv(width, tile.columns), tiles.expert.shape[0])](
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
        PADDED_INTERMEDIATE=width,
        ACTIVATION=tl.bfloat16 if activation == torch.bfloat16 else tl.float32,
        QUANTIZE=quantize,
        BLOCK_N=tile.columns,
        BLOCK_M=tile.rows,
        BLOCK_K=tiling.WORD_BLOCK_K,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return h
