"""The curve between and beyond its sizes, and what real steps teach."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.speculative.step_time import (
    MIN_OF_A_SIZE,
    MIN_RECENT,
    NUM_RECENT,
    Learned,
    StepTimeCurve,
    StepTimeLearner,
    profile_sizes,
)

EAGER = StepTimeCurve(rows=(1, 2, 4, 8), times_s=(1.0, 2.0, 3.0, 5.0))
GRAPHS = StepTimeCurve(rows=(2, 4, 5, 8), times_s=(1.0, 2.0, 10.0, 16.0), largest_graph=4)


def test_without_graphs_the_time_is_a_line_between_sizes_and_goes_on_behind_them() -> None:
    assert EAGER.times(10).tolist() == [1.0, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]


def test_a_graph_takes_one_time_up_to_its_size_and_the_first_step_without_one_is_not_blended() -> None:
    assert GRAPHS.times(8).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 10.0, 12.0, 14.0, 16.0]
    assert GRAPHS.padded(np.arange(9)).tolist() == [2, 2, 2, 4, 4, 5, 6, 7, 8]


def test_a_time_that_falls_with_the_rows_is_noise() -> None:
    assert StepTimeCurve(rows=(1, 2, 3), times_s=(2.0, 1.0, 4.0)).times(3).tolist() == [2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("rows", "times_s"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((0, 1), (1.0, 2.0)), ((1,), (0.0,)), ((1,), (float("nan"),))],
)
def test_a_curve_that_is_none_is_refused(rows: tuple[int, ...], times_s: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"step times: rows are .* expected ascending"):
        StepTimeCurve(rows=rows, times_s=times_s)


def test_nothing_is_learned_from_no_step() -> None:
    assert StepTimeLearner(EAGER).learned() == Learned()
    assert Learned().times(EAGER, 3, 4).tolist() == EAGER.times(4).tolist()


def test_the_slope_is_what_steps_take_longer_a_row_and_is_never_negative() -> None:
    learner = StepTimeLearner(EAGER)
    for _ in range(MIN_OF_A_SIZE - 1):
        learner.add(4, 1, 3.0 + 4 * 0.5, 0.0)
    assert learner.learned().slope_s == 0.0  # too few
    learner.add(4, 1, 100.0, 0.0)  # one that was disturbed
    assert learner.learned().slope_s == 0.5
    for _ in range(MIN_OF_A_SIZE):
        learner.add(8, 1, 5.0 + 8 * 0.1, 0.0)
        learner.add(1, 1, 0.5, 0.0)
        learner.add(99, 1, 1e9, 0.0)  # beyond the curve
    assert learner.learned().slope_s == pytest.approx(0.1)  # the median of 0.5, 0.1 and -0.5
    faster = StepTimeLearner(EAGER)
    for _ in range(MIN_OF_A_SIZE):
        faster.add(4, 1, 1.0, 0.0)
    assert faster.learned().slope_s == 0.0


def test_the_time_behind_the_forward_pass_is_that_of_recent_steps_with_as_many_requests() -> None:
    learner = StepTimeLearner(EAGER)
    for _ in range(MIN_RECENT - 1):
        learner.add(4, 2, 3.0, 7.0)
    assert learner.learned().behind_s == {}
    assert learner.learned().behind_any_s == 7.0
    for _ in range(NUM_RECENT):
        learner.add(4, 2, 3.0, 1.0)
    assert learner.learned().behind_s == {2: 1.0}
    found = learner.learned().times(EAGER, 2, 4)
    assert found.tolist() == (EAGER.times(4) + 1.0).tolist()


def test_a_slope_counts_padded_rows() -> None:
    found = Learned(slope_s=1.0).times(GRAPHS, 1, 5)
    assert (found - GRAPHS.times(5)).tolist() == [2.0, 2.0, 2.0, 4.0, 4.0, 5.0]


def test_sizes_to_measure_are_the_graphs_and_what_lies_beyond() -> None:
    assert profile_sizes((), 20) == (1, 2, 4, 8, 16, 20)
    assert profile_sizes((1, 2, 24), 100) == (1, 2, 24, 25, 32, 64, 100)
    assert profile_sizes((1, 4), 4) == (1, 4)
