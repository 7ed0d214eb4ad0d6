"""Selection on the device: rows of any length against the reference, ties at every border."""

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices
from deepinfer_kernels.indexer_topk.reference import (
    candidate_blocks_reference,
    mask_to_candidates_reference,
    topk_indices_reference,
)
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = NEEDS_GPU
LIMIT = tiling.TOPK_CHUNK


def make_scores(num_tokens: int, num_entries: int, kind: str) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(num_entries)
    scores = torch.randn(num_tokens, num_entries, generator=generator, device="cuda")
    if kind == "ties":
        scores = (scores * 2).round() / 2
    elif kind == "bf16":
        scores = scores.bfloat16().float()
    num_visible = torch.randint(0, num_entries + 1, (num_tokens, 1), generator=generator, device="cuda")
    num_visible[0] = num_entries
    return scores.masked_fill(torch.arange(num_entries, device="cuda") >= num_visible, -torch.inf)


@pytest.mark.parametrize("kind", ["ties", "bf16", "fp32"])
@pytest.mark.parametrize("num_entries", [100, 2049, LIMIT, LIMIT + 1, 3 * LIMIT + 17, 131072])
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_selections_are_those_of_the_reference(k: int, num_entries: int, kind: str) -> None:
    scores = make_scores(9, num_entries, kind)
    assert_bitwise_equal(topk_indices(scores, k), topk_indices_reference(scores, k), f"top {k}")


def test_a_million_entries_and_nothing_but_ties() -> None:
    scores = make_scores(3, 1 << 20, "bf16")
    scores[1] = 0.0
    scores[2] = -torch.inf
    want = topk_indices_reference(scores, 2048)
    assert_bitwise_equal(topk_indices(scores, 2048), want, "top 2048 of 2^20")
    assert_graph_gives_eager_bits(lambda: topk_indices(scores, 512), "topk_indices")
    odd = torch.tensor([[torch.inf, float("nan"), -0.0, 0.0, -torch.inf, -3e38]], device="cuda").repeat(1, 3000)
    assert_bitwise_equal(topk_indices(odd, 7000), topk_indices_reference(odd, 7000), "extremes")


@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("width", [LIMIT + 1, 5 * LIMIT, 262144, 1 << 20])
def test_the_width_of_the_buffer_changes_nothing(width: int, k: int) -> None:
    """Contexts on both sides of every chunk, in wide buffers; behind them stands what would win if it were read."""
    counts = [0, 1, k - 1, k, k + 1, LIMIT - 1, LIMIT, LIMIT + 1, 16 * k, 16 * k + 1, 3 * LIMIT + 5, width]
    num_visible = torch.tensor(counts, device="cuda").clamp_max(width)
    scores = make_scores(len(counts), width, "ties")
    is_hidden = torch.arange(width, device="cuda") >= num_visible[:, None]
    want = topk_indices_reference(scores.masked_fill(is_hidden, -torch.inf), k)
    junk = scores.masked_fill(is_hidden, 9.0)
    assert_bitwise_equal(topk_indices(junk, k, num_visible), want, f"top {k} of {width}")
    blocks = candidate_blocks_reference(scores, num_visible, k, 8)
    assert_bitwise_equal(candidate_blocks(junk, num_visible, k, 8), blocks, f"{k} blocks of {width}")
    for row in range(len(counts)):
        narrow = max(1, int(num_visible[row]))
        alone = topk_indices(junk[row : row + 1, :narrow], k, num_visible[row : row + 1])
        assert_bitwise_equal(alone, want[row : row + 1], f"row {row} alone, as wide as its context")


@pytest.mark.parametrize("num_entries", [1000, 20001, 131072])
def test_candidates_are_those_of_the_reference(num_entries: int) -> None:
    scores = make_scores(9, num_entries, "bf16")
    num_visible = (scores > -torch.inf).sum(dim=1)
    for num_blocks in (16, 2048):
        blocks = candidate_blocks(scores, num_visible, num_blocks, 8)
        assert_bitwise_equal(blocks, candidate_blocks_reference(scores, num_visible, num_blocks, 8), "blocks")
        got = mask_to_candidates(scores, blocks, 8)
        assert_bitwise_equal(got, mask_to_candidates_reference(scores, blocks, 8), "masked")
