"""The sum against fp64, at its edges, and per row."""

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.sum_smaller_probs import sum_smaller_probs
from deepinfer_kernels.testing import assert_bitwise_equal

VOCABULARY = 300


def make_inputs(num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randint(-40, 41, (num_rows, VOCABULARY), generator=generator) / 8  # many ties
    logits[:, ::7] = -torch.inf
    tokens = torch.randint(0, VOCABULARY, (num_rows,), generator=generator)
    return logits.to(device), tokens.to(device)


def test_it_is_the_sum_in_ascending_order(device: str) -> None:
    logits, tokens = make_inputs(16, device)
    got = sum_smaller_probs(logits, tokens)
    probs = torch.softmax(logits.double(), dim=1)
    for row, token in enumerate(tokens.tolist()):
        ranked = sorted(range(VOCABULARY), key=lambda i: (logits[row, i].item(), i))
        expected = sum(probs[row, i].item() for i in ranked[: ranked.index(token) + 1])
        assert got[row].item() == pytest.approx(expected, abs=1e-6)


def test_it_ends_at_one_and_begins_with_the_least_likely(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -torch.inf]] * 4, device=device)
    got = sum_smaller_probs(logits, torch.tensor([0, 1, 2, 3], device=device))
    probs = torch.softmax(torch.tensor([0.0, 1.0, 1.0]).double(), dim=0).tolist()
    assert got.tolist() == pytest.approx([probs[0], probs[0] + probs[1], 1.0, 0.0], abs=1e-7)
    assert got[2].item() == 1.0


def test_rows_without_numbers_give_zero_and_nan_counts_as_none(device: str) -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf], [torch.nan, torch.nan], [torch.nan, 2.0]], device=device)
    assert sum_smaller_probs(logits, torch.tensor([1, 0, 1], device=device)).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_every_row_keeps_its_bits_in_any_batch(rows: int, device: str) -> None:
    logits, tokens = make_inputs(rows, device)
    alone = [sum_smaller_probs(logits[i : i + 1], tokens[i : i + 1]) for i in range(rows)]
    expected = torch.cat(alone) if alone else torch.empty(0, device=device)
    assert_bitwise_equal(sum_smaller_probs(logits, tokens), expected, label=f"{rows} rows in one batch")


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ShapeError, match="token_ids is"):
        sum_smaller_probs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="logits"):
        sum_smaller_probs(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="columns, expected at most"):
        sum_smaller_probs(torch.zeros(1, 1 << 20), torch.zeros(1, dtype=torch.int64))
