import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices
from deepinfer_kernels.indexer_topk.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal, require_golden

INF = float("inf")


def _scores(num_tokens: int, num_entries: int, device: str) -> torch.Tensor:
    return make_inputs(num_tokens, num_entries, torch.Generator().manual_seed(7), device)


def _want_topk(row: list[float], k: int) -> list[int]:
    order = sorted((i for i in range(len(row)) if row[i] > -INF), key=lambda i: (-row[i], i))
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


@pytest.mark.parametrize("vectors", ["a", "b"])
def test_selections_are_the_golden_ones(vectors: str, device: str) -> None:
    golden = {k: v.to(device) for k, v in load_file(require_golden(f"kernels/vectors_{vectors}.safetensors")).items()}
    num_visible = torch.arange(1, 41, device=device)
    hidden = torch.arange(40, device=device) >= num_visible[:, None]
    scores = golden["index.scores_bf16"].float().masked_fill(hidden, -INF)
    assert_bitwise_equal(topk_indices(scores, 8), golden["index.topk"], label="top-k")
    blocks = candidate_blocks(scores, num_visible, 4, 4)
    in_candidates = mask_to_candidates(scores, blocks, 4)
    want = golden["index.candidates"].bool() & ~hidden
    assert_bitwise_equal(in_candidates > -INF, want, label="candidates")
    assert_bitwise_equal(topk_indices(in_candidates, 8), golden["index.topk_in_candidates"], label="in candidates")


@pytest.mark.parametrize("num_entries", [0, 1, 7, 8, 9, 64, 300])
@pytest.mark.parametrize("num_tokens", [0, 1, 25])
def test_topk_orders_by_score_then_index(num_tokens: int, num_entries: int, device: str) -> None:
    scores = _scores(num_tokens, num_entries, device)
    want = [_want_topk(row, 8) for row in scores.tolist()]
    got = topk_indices(scores, 8)
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int32).view(num_tokens, 8), label="top-8")


def test_topk_takes_extremes_and_never_minus_infinity_or_nan(device: str) -> None:
    largest = torch.finfo(torch.float32).max
    rows = [[-INF, -largest, float("nan"), -0.0, 0.0, largest], [INF, -INF, INF, -1.0, -2.0, -INF], [-INF] * 6]
    scores = torch.tensor(rows, device=device)
    assert topk_indices(scores, 2).tolist() == [[3, 5], [0, 2], [-1, -1]]
    assert topk_indices(scores, 3).tolist() == [[3, 4, 5], [0, 2, 3], [-1, -1, -1]]
    assert topk_indices(scores, 8).tolist()[0] == [1, 3, 4, 5, -1, -1, -1, -1]
    assert topk_indices(scores, 0).shape == (3, 0)


def test_columns_of_minus_infinity_and_other_rows_change_nothing(device: str) -> None:
    scores = _scores(33, 50, device)
    batch = topk_indices(scores, 8)
    wide = torch.full((33, 400), -INF, device=device)
    wide[:, :50] = scores
    assert_bitwise_equal(topk_indices(wide, 8), batch, label="more columns")
    assert_bitwise_equal(topk_indices(wide[:, :50], 8), batch, label="strided rows")
    assert_bitwise_equal(torch.cat([topk_indices(scores[t : t + 1], 8) for t in range(33)]), batch, label="alone")
    num_visible = (scores > -INF).sum(dim=1)
    blocks = candidate_blocks(scores, num_visible, 3, 4)
    assert_bitwise_equal(candidate_blocks(wide, num_visible, 3, 4), blocks, label="blocks, more columns")
    alone = [candidate_blocks(scores[t : t + 1], num_visible[t : t + 1], 3, 4) for t in range(33)]
    assert_bitwise_equal(torch.cat(alone), blocks, label="blocks alone")


@pytest.mark.parametrize("junk", [INF, float("nan"), 9.0])
@pytest.mark.parametrize("width", [50, 51, 400, 20000])
def test_what_lies_beyond_the_visible_entries_is_not_read(width: int, junk: float, device: str) -> None:
    scores = _scores(33, 50, device)
    num_visible = (scores > -INF).sum(dim=1)
    wide = torch.full((33, width), junk, device=device)
    wide[:, :50] = scores.masked_fill(scores == -INF, junk)
    want, blocks = topk_indices(scores, 8), candidate_blocks(scores, num_visible, 3, 4)
    assert_bitwise_equal(topk_indices(wide, 8, num_visible), want, label=f"top-8 of {width}")
    assert_bitwise_equal(candidate_blocks(wide, num_visible, 3, 4), blocks, label=f"blocks of {width}")


@pytest.mark.parametrize("num_entries", [0, 1, 3, 4, 5, 50])
def test_candidate_blocks_rank_by_best_entry_with_the_newest_pinned(num_entries: int, device: str) -> None:
    scores = _scores(20, num_entries, device)
    num_visible = (scores > -INF).sum(dim=1)
    want = []
    for row, visible in zip(scores.tolist(), num_visible.tolist(), strict=True):
        best = [max(row[b : b + 4]) for b in range(0, num_entries, 4)]
        if visible:
            best[(visible - 1) // 4] = INF
        want.append(_want_topk(best, 3))
    got = candidate_blocks(scores, num_visible, 3, 4)
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int32).view(20, 3), label="blocks")


def test_scores_outside_the_candidate_blocks_become_minus_infinity(device: str) -> None:
    scores = torch.arange(10, dtype=torch.float32, device=device).expand(3, 10)
    blocks = torch.tensor([[0, 2, -1], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32, device=device)
    got = mask_to_candidates(scores, blocks, 4)
    want = [[0.0, 1.0, 2.0, 3.0, *[-INF] * 4, 8.0, 9.0], [*[-INF] * 4, 4.0, 5.0, 6.0, 7.0, -INF, -INF], [-INF] * 10]
    assert got.tolist() == want
    assert mask_to_candidates(scores[:, :0], blocks, 4).shape == (3, 0)


def test_errors_name_operation_argument_and_rule() -> None:
    scores = _scores(3, 9, "cpu")
    with pytest.raises(UnsupportedError, match=r"topk_indices: scores is torch.bfloat16, expected torch.float32"):
        topk_indices(scores.bfloat16(), 2)
    with pytest.raises(ShapeError, match=r"topk_indices: scores has shape \[9\]"):
        topk_indices(scores[0], 2)
    with pytest.raises(ShapeError, match="topk_indices: k is -1, expected at least 0"):
        topk_indices(scores, -1)
    with pytest.raises(ShapeError, match="candidate_blocks: block_size is 0, expected at least 1"):
        candidate_blocks(scores, torch.zeros(3), 2, 0)
    with pytest.raises(ShapeError, match=r"candidate_blocks: num_visible has shape \[2\], expected \[3\]"):
        candidate_blocks(scores, torch.zeros(2), 2, 4)
    with pytest.raises(ShapeError, match=r"mask_to_candidates: blocks has shape \[2, 4\], expected \[3, B\]"):
        mask_to_candidates(scores, torch.zeros(2, 4, dtype=torch.int32), 4)
    with pytest.raises(ShapeError, match=r"topk_indices: num_visible has shape \[2\], expected \[3\]"):
        topk_indices(scores, 2, torch.zeros(2, dtype=torch.int64))
