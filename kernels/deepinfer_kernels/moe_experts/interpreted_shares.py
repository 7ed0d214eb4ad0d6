"""Experts cut by outputs against whole ones, through the kernels in Triton's interpreter, to the bit; no GPU.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.moe_experts.interpreted_shares`` raises on the first difference and
prints how often the kernels were launched. The interpreter knows no inline assembly and cannot multiply bf16: weights
are unpacked by plain Triton, and operands of products are fp32 here. With ``swapped`` behind it the ranks stand in
another order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import sys
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.interpreted_bounds import checked_bounds
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.moe_experts import down_kernel, up_kernel
from deepinfer_kernels.moe_experts.reference import cut_weights, make_inputs
from deepinfer_kernels.moe_experts.route_kernel import Tiles, route_pairs
from deepinfer_kernels.moe_experts.shares import all_turned_columns, turned_columns
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_kernels.triton_formats import power_of_two

HIDDEN_SIZE, TOP_K, NUM_EXPERTS = 96, 2, 3
# Columns of the intermediate and ranks: whole blocks, units of 32 columns with and without a filled up block, fewer.
CUTS = ((256, 2), (256, 8), (160, 5), (96, 12), (32, 2))


@triton.jit
def _value(code):
    """fp32 of an e2m1 code."""
    magnitude = code & 7
    exponent = tl.where(magnitude < 2, 1, magnitude >> 1)
    value = tl.where(magnitude < 2, magnitude, 2 + (magnitude & 1)).to(tl.float32) * power_of_two(125 + exponent)
    return tl.where(code & 8 > 0, -value, value)


@triton.jit
def _unpack(words, packed_scale, ROWS: tl.constexpr):
    """As ``unpack_e2m1``, in fp32."""
    scale = (packed_scale[:, None] >> (tl.arange(0, 32) // 8 * 8)[None, :]) & 255  # of every word
    factor = power_of_two(scale - 16)
    codes = words.to(tl.int32)
    even = tl.join(_value(codes & 15) * factor, _value((codes >> 4) & 15) * factor)
    odd = tl.join(_value((codes >> 8) & 15) * factor, _value((codes >> 12) & 15) * factor)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 2, 1)), [ROWS, 128])


class _Experts:
    """Inputs of one call, and both products of it or of a share."""

    def __init__(self, inner: int, tile: int) -> None:
        generator = torch.Generator().manual_seed(inner)
        inputs = make_inputs(5, TOP_K, HIDDEN_SIZE, inner, NUM_EXPERTS, torch.float32, generator, "cpu")
        x, self.topk_idx, self.topk_weights, *self.weights = inputs.values()
        self.rows = prepare_rows(x.bfloat16(), codes=tiling.E2M1_CODES, quantize=False).float()
        self.tile, self.down_tile = tiling.EXPERT_TILES[tile][1], tiling.EXPERT_DOWN_TILES[tile][1]

    def _tiles(self) -> Tiles:
        return route_pairs(self.topk_idx, NUM_EXPERTS, self.tile.rows)

    def up(self, weights: list[torch.Tensor], turned: int) -> torch.Tensor:
        w13, w13_scale, _, _ = weights
        return up_kernel.experts_up(
            self.rows,
            w13,
            w13_scale,
            self.topk_weights,
            self._tiles(),
            limit=7.0,
            activation=torch.bfloat16,
            quantize=False,
            tile=self.tile,
            turned=turned,
        )

    def down(self, h: torch.Tensor, weights: list[torch.Tensor], turned: int) -> torch.Tensor:
        _, _, w2, w2_scale = weights
        return down_kernel.experts_down(
            h.float(), w2, w2_scale, self._tiles(), out_dtype=torch.float32, tile=self.down_tile, turned=turned
        )


def run(*, are_swapped: bool) -> int:
    """Every cut with a small and with a large tile."""
    with (
        checked_bounds() as launches,
        patch.object(up_kernel, "unpack_e2m1", _unpack),
        patch.object(down_kernel, "unpack_e2m1", _unpack),
    ):
        for inner, num_ranks in CUTS:
            for tile in (0, -2):
                experts = _Experts(inner, tile)
                whole = tiling.WORD_BLOCK_K
                want = experts.down(experts.up(experts.weights, whole), experts.weights, whole)
                assert want.unique().numel() > want.numel() // 2, "hardly any result differs from the others"
                shares = [cut_weights(experts.weights, rank, num_ranks) for rank in range(num_ranks)]
                turned = turned_columns(inner // num_ranks, torch.Tensor.clone)
                parts = [experts.up(share, turned) for share in shares]
                side_by_side = torch.cat(parts[::-1] if are_swapped else parts, dim=1)
                h, turned = all_turned_columns(side_by_side, inner, torch.Tensor.clone, turned, quantize=False)
                got = torch.cat([experts.down(h, share, turned) for share in shares], dim=1)
                assert_bitwise_equal(got, want, f"{inner} columns on {num_ranks} ranks")
    return launches.total()


if __name__ == "__main__":
    print("launches", run(are_swapped="swapped" in sys.argv))  # noqa: T201
