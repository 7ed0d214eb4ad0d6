"""The routed experts on an NVIDIA GPU."""

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.triton_kernel import packed_operand, tile_for
from deepinfer_kernels.linear.weights import padded_depth
from deepinfer_kernels.moe_experts.down_kernel import experts_down
from deepinfer_kernels.moe_experts.route_kernel import route_pairs
from deepinfer_kernels.moe_experts.shares import Gather, all_turned_columns, turned_columns
from deepinfer_kernels.moe_experts.up_kernel import experts_up


def moe_experts_triton(
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
    num_experts, num_outputs = w2.shape[:2]
    if num_tokens == 0:
        return torch.empty((0, top_k, num_outputs), dtype=x.dtype, device=x.device)
    average = -(-num_tokens * top_k // (num_experts * num_shares))
    up_tile = tile_for(tiling.EXPERT_TILES, average)
    down_tile = tile_for(tiling.EXPERT_DOWN_TILES, average)
    tiles = route_pairs(topk_idx.contiguous(), num_experts, up_tile.rows)
    if rows is None:
        rows = prepare_rows(x, codes=tiling.E2M1_CODES, quantize=quantize_input)
    else:  # the kernel reads whole blocks of words: with narrower rows it would read beyond the weights
        assert rows.shape[1] == padded_depth(x.shape[1]), (rows.shape, x.shape)
    turned = turned_columns(w13.shape[1] // 2, gather)
    h = experts_up(
        rows,
        packed_operand(w13),
        packed_operand(w13_scale),
        topk_weights.contiguous(),
        tiles,
        limit=limit,
        activation=x.dtype,
        quantize=quantize_input,
        tile=up_tile,
        turned=turned,
    )
    h, turned = all_turned_columns(h, w2.shape[2] * 2, gather, turned, quantize=quantize_input)
    out = experts_down(
        h, packed_operand(w2), packed_operand(w2_scale), tiles, out_dtype=x.dtype, tile=down_tile, turned=turned
    )
    return out.view(num_tokens, top_k, num_outputs)
