"""The rule against a plain search over all lengths, its ties, and what makes no draft worth its row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_plugin.speculative.budget import survival, verified_lengths

FLAT = np.full(64, 2.0)
LINEAR = 1.0 + np.arange(64.0)


def _lengths(confidence: list[list[float]], times: np.ndarray, num_drafts: list[int] | None = None) -> list[int]:
    table = np.array(confidence, dtype=np.float32)
    counts = np.full(len(table), table.shape[1]) if num_drafts is None else np.array(num_drafts)
    found: list[int] = verified_lengths(table, counts, len(table), len(table), times).tolist()
    return found


def test_survival_is_the_running_product_and_ends_with_the_drafts() -> None:
    found = survival(np.array([[0.5, 0.5, 1.0], [1.0, 0.25, 0.5]]), np.array([3, 1]))
    assert found.tolist() == [[0.5, 0.25, 0.25], [1.0, -1.0, -1.0]]


def test_confidences_that_are_no_chances_are_brought_into_bounds() -> None:
    found = survival(np.array([[1.5, np.nan, 1.0], [-0.5, 1.0, np.inf]]), np.array([3, 3]))
    assert found.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_rows_that_cost_nothing_are_all_verified_unless_they_cannot_be_accepted() -> None:
    assert _lengths([[0.1, 0.1], [1.0, 0.0]], FLAT) == [2, 1]


def test_rows_that_cost_more_than_they_bring_are_not_verified() -> None:
    assert _lengths([[0.4, 0.9], [0.3, 0.9]], LINEAR) == [0, 0]


def test_the_more_likely_request_gets_the_rows() -> None:
    times = np.where(np.arange(64) <= 4, 1.0, 100.0)  # two rows of drafts are free, the third is not
    assert _lengths([[0.6, 0.6, 0.6], [0.9, 0.9, 0.1]], times) == [0, 2]


def test_equal_chances_go_to_the_lower_request_then_to_the_lower_draft() -> None:
    for free, expected in ((1, [1, 0, 0]), (2, [2, 0, 0]), (3, [2, 1, 0]), (5, [2, 2, 1])):
        times = np.where(np.arange(64) <= 3 + free, 1.0, 100.0)
        assert _lengths([[1.0, 1.0]] * 3, times) == expected


def test_of_equally_good_totals_the_smaller_is_taken() -> None:
    assert _lengths([[1.0]], np.array([1.0, 1.0, 2.0])) == [0]  # 1 token in 1 or 2 tokens in 2


def test_a_graph_is_filled_up_to_its_size() -> None:
    padded = np.array([1.0] * 9 + [3.0] * 55)  # rows up to 8 take one time
    assert sum(_lengths([[0.2] * 5] * 3, padded)) == 5


def test_no_requests_and_no_drafts() -> None:
    assert verified_lengths(np.ones((0, 5)), np.zeros(0, dtype=np.int64), 4, 1, FLAT).tolist() == []
    assert _lengths([[1.0], [1.0]], FLAT, [0, 0]) == [0, 0]


@given(
    confidence=st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=2), min_size=1, max_size=3
    ),
    steps=st.lists(st.floats(0.0, 2.0), min_size=16, max_size=16),
)
def test_no_choice_of_lengths_is_better(confidence: list[list[float]], steps: list[float]) -> None:
    times = 1.0 + np.cumsum(np.array(steps))
    chances = survival(np.array(confidence), np.full(len(confidence), 2))

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = len(confidence) + sum(float(chances[i, :n].sum()) for i, n in enumerate(lengths))
        return tokens / float(times[len(confidence) + sum(lengths)])

    found = tuple(_lengths(confidence, times))
    best = max(rate(lengths) for lengths in itertools.product(range(3), repeat=len(confidence)))
    assert rate(found) == pytest.approx(best, rel=1e-12)
