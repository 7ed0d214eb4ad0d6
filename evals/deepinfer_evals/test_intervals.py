"""Statistics against values worked out by hand or by counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from deepinfer_evals import intervals

RESULTS = {"a": {1: True, 2: True}, "b": {1: True, 2: False}, "c": {1: False, 2: False}, "d": {1: True}}


def test_a_score_is_the_mean_over_questions_whatever_the_number_of_epochs() -> None:
    assert intervals.question_means(RESULTS).tolist() == [1.0, 0.5, 0.0, 1.0]
    found = intervals.bootstrap_mean(intervals.question_means(RESULTS))
    assert found.mean == 0.625
    assert 0.0 <= found.low < 0.625 < found.high <= 1.0


def test_the_interval_is_that_of_the_normal_distribution_for_many_questions() -> None:
    values = np.array([1.0] * 300 + [0.0] * 700)
    found = intervals.bootstrap_mean(values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert abs(found.low - (0.3 - half)) < 0.003
    assert abs(found.high - (0.3 + half)) < 0.003
    assert intervals.bootstrap_mean(values) == found


def test_all_equal_questions_have_an_interval_of_no_width() -> None:
    found = intervals.bootstrap_mean(np.ones(5))
    assert (found.low, found.mean, found.high) == (1.0, 1.0, 1.0)


def test_epochs_are_scored_over_the_questions_that_have_them() -> None:
    assert intervals.epoch_scores(RESULTS) == {1: 0.75, 2: 1 / 3}
    assert intervals.spread([0.5]) is None
    assert intervals.spread([0.4, 0.6]) == pytest.approx(0.1414213562)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    for size, right in itertools.product(range(1, 7), range(7)):
        if right > size:
            continue
        for k in range(1, size + 1):
            draws = list(itertools.combinations(range(size), k))
            share = sum(any(index < right for index in draw) for draw in draws) / len(draws)
            assert intervals.pass_at_k(size, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_leaves_out_questions_with_fewer_answers() -> None:
    value, count = intervals.pass_at_k_of(RESULTS, 2)
    assert value == pytest.approx(2 / 3)
    assert count == 3


@pytest.mark.parametrize(("size", "right", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(size: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        intervals.pass_at_k(size, right, k)


def test_two_runs_are_compared_on_what_both_have() -> None:
    better = {"a": {1: True, 2: True}, "b": {1: True, 2: True}, "c": {1: True}, "z": {1: True}}
    found = intervals.paired(RESULTS, better)
    assert found.difference.mean == pytest.approx((0 + 0.5 + 1) / 3)
    assert (found.better, found.worse, found.equal) == (2, 0, 1)
    assert found.p_value == 0.5  # two of the four sign patterns reach 1.5


def test_many_equal_moves_in_one_direction_are_no_chance() -> None:
    none = {str(index): {1: False} for index in range(40)}
    every = {str(index): {1: True} for index in range(40)}
    assert intervals.paired(none, every).p_value < 0.001
    assert intervals.paired(none, none).p_value == 1.0


def test_a_run_against_noise_is_rarely_called_different() -> None:
    generator = np.random.Generator(np.random.PCG64(3))
    called = 0
    for _ in range(40):
        first, second = (
            {str(index): {1: bool(value)} for index, value in enumerate(generator.integers(0, 2, 12))} for _ in range(2)
        )
        called += intervals.paired(first, second).p_value < 0.05
    assert called <= 6
