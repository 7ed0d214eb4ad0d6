import math

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.restrict_logits.reference import MAX_VOCABULARY, make_inputs
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

INF, NAN = float("inf"), float("nan")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(num_rows: int, vocab_size: int, device: str, seed: int = 11) -> Inputs:
    return make_inputs(num_rows, vocab_size, torch.Generator().manual_seed(seed), device)


def _want(row: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """The rule of the contract in Python's double precision."""
    is_free = not 0 < top_k < len(row) and top_p >= 1.0 and min_p <= 0.0
    if is_free or not row:
        return row
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    largest = row[order[0]]
    weights = [1.0 if row[token] == largest else math.exp(row[token] - largest) for token in order]
    if min_p > 0.0:
        weights = [weight for weight in weights if weight >= min_p]
    if 0 < top_k < len(row):
        weights = weights[:top_k]
    kept = len(weights)
    if top_p < 1.0:
        total = sum(weights)
        kept = sum(sum(weights[:rank]) < top_p * total for rank in range(len(weights)))
    chosen = set(order[: max(kept, 1)])
    return [value if token in chosen else -INF for token, value in enumerate(row)]


def _one(row: list[float], device: str, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    got = restrict_logits(
        torch.tensor([row], device=device),
        torch.tensor([top_k], dtype=torch.int64, device=device),
        torch.tensor([top_p], device=device),
        torch.tensor([min_p], device=device),
    )
    return [float(value) for value in got[0]]


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 200])
@pytest.mark.parametrize("num_rows", [0, 1, 60])
def test_restrictions_are_those_of_a_plain_double_precision_rule(num_rows: int, vocab_size: int, device: str) -> None:
    logits, top_k, top_p, min_p = _inputs(num_rows, vocab_size, device)
    rows = zip(logits.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    want = torch.tensor([_want(*row) for row in rows]).view(num_rows, vocab_size)
    got = restrict_logits(logits, top_k, top_p, min_p)
    assert_bitwise_equal(got.cpu(), want, label=f"{num_rows} rows of {vocab_size}")


def test_continuous_logits_agree_too(device: str) -> None:
    _, top_k, top_p, min_p = _inputs(60, 300, device)
    logits = (torch.randn(60, 300, generator=torch.Generator().manual_seed(2)) * 3).to(device)
    rows = zip(logits.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    want = torch.tensor([_want(*row) for row in rows])
    assert_bitwise_equal(restrict_logits(logits, top_k, top_p, min_p).cpu(), want, label="normal logits")


def test_ties_at_a_border_keep_the_lower_ids(device: str) -> None:
    row = [0.0, 1.0, 1.0, 0.0, 1.0, -0.0, 0.0]
    assert _one(row, device, top_k=2) == [-INF, 1.0, 1.0, -INF, -INF, -INF, -INF]
    assert _one(row, device, top_k=5) == [0.0, 1.0, 1.0, 0.0, 1.0, -INF, -INF]
    equal = [2.0] * 8
    assert _one(equal, device, top_p=0.5) == [2.0] * 4 + [-INF] * 4
    assert _one(equal, device, top_p=0.51) == [2.0] * 5 + [-INF] * 3
    assert _one(equal, device, min_p=1.0) == equal
    assert _one([3.0, 3.0, 2.0], device, min_p=1.0) == [3.0, 3.0, -INF]


def test_restrictions_apply_one_after_the_other(device: str) -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    keep = [value > -INF for value in _one(row, device, top_k=3, top_p=0.7)]
    assert keep == [True, True, False, False]  # of the top three 4/9 and 3/9: 7/9 reach 0.7
    keep = [value > -INF for value in _one(row, device, top_p=0.85)]
    assert keep == [True, True, True, False]
    keep = [value > -INF for value in _one(row, device, top_p=0.85, min_p=0.6)]
    assert keep == [True, True, False, False]  # 3/4 of the largest stays, 2/4 does not; then 4/7 alone is too little


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-6])
def test_the_largest_logit_always_stays(top_p: float, device: str) -> None:
    assert _one([1.0, 2.0, 2.0, 0.0], device, top_p=top_p) == [-INF, 2.0, -INF, -INF]
    assert _one([1.0, 2.0, 2.0, 0.0], device, min_p=1.0, top_k=1, top_p=top_p) == [-INF, 2.0, -INF, -INF]


def test_infinite_logits_and_nan(device: str) -> None:
    assert _one([NAN, 1.0, 0.0], device, top_k=2) == [-INF, 1.0, 0.0]
    assert _one([NAN, -INF, NAN], device, top_k=1) == [-INF] * 3
    assert _one([INF, 5.0, INF, NAN], device, top_p=0.9) == [INF, -INF, INF, -INF]
    assert _one([INF, 5.0, INF, 0.0], device, top_k=3) == [INF, 5.0, INF, -INF]
    assert _one([-INF, 5.0, -INF], device, min_p=0.5) == [-INF, 5.0, -INF]


def test_a_row_without_restriction_keeps_every_bit(device: str) -> None:
    logits = torch.tensor([[NAN, -0.0, INF, -INF], [1.0, 2.0, 3.0, 4.0]], device=device)
    top_k = torch.tensor([4, 2], dtype=torch.int32, device=device)
    ones, zeros = torch.ones(2, device=device), torch.zeros(2, device=device)
    got = restrict_logits(logits, top_k, ones, zeros)
    assert_bitwise_equal(got[0], logits[0], label="free row beside a restricted one")
    assert_bitwise_equal(restrict_logits(logits[:1], top_k[:1], ones[:1], zeros[:1])[0], logits[0], label="free row")
    assert got.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("vocab_size", [5, 64, 257])
def test_every_row_keeps_its_bits_in_any_batch(vocab_size: int, device: str) -> None:
    inputs = _inputs(40, vocab_size, device)
    assert_rows_keep_their_bits(lambda rows: restrict_logits(*(x[rows] for x in inputs)), 40, "restricted")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_strides_and_edges_of_a_batch(num_rows: int, device: str) -> None:
    logits, top_k, top_p, min_p = _inputs(num_rows, 50, device)
    wide = torch.full((num_rows, 77), NAN, device=device)
    wide[:, :50] = logits
    want = restrict_logits(logits, top_k, top_p, min_p)
    assert_bitwise_equal(restrict_logits(wide[:, :50], top_k, top_p, min_p), want, label="rows of a wider matrix")
    assert restrict_logits(logits[:, :0], top_k, top_p, min_p).shape == (num_rows, 0)


def test_a_whole_vocabulary_of_small_weights(device: str) -> None:
    """Half of 129,280 equal tokens: the sum of weights must be exact for the border to be exact."""
    logits = torch.full((1, 129280), 3.0, device=device)
    half = torch.tensor([0.5], device=device)
    off = torch.zeros(1, dtype=torch.int32, device=device)
    kept = restrict_logits(logits, off, half, torch.zeros(1, device=device)) > -INF
    assert int(kept.sum()) == 64640
    assert bool(kept[0, :64640].all())


def test_errors_name_operation_argument_and_rule() -> None:
    logits, top_k, top_p, min_p = _inputs(3, 9, "cpu")
    with pytest.raises(UnsupportedError, match=r"restrict_logits: logits is torch.bfloat16, expected torch.float32"):
        restrict_logits(logits.bfloat16(), top_k, top_p, min_p)
    with pytest.raises(UnsupportedError, match=r"restrict_logits: top_k is torch.float32, expected torch.int32"):
        restrict_logits(logits, top_p, top_p, min_p)
    with pytest.raises(ShapeError, match=r"restrict_logits: min_p is \[2\], expected \[3\]"):
        restrict_logits(logits, top_k, top_p, min_p[:2])
    with pytest.raises(ShapeError, match="expected at most 1048575"):
        restrict_logits(torch.zeros(1, 1).expand(3, MAX_VOCABULARY + 1), top_k, top_p, min_p)
