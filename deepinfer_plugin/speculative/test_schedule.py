"""The plan that the runner sees: shorter, and beside it the scheduler's own, unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from deepinfer_plugin.speculative import schedule, schedule_series
from deepinfer_plugin.speculative.schedule import (
    ByConfidence,
    Confidences,
    LengthRule,
    NoLengths,
    RandomLengths,
    StepDrafts,
    VerificationSchedule,
    cut_output,
)
from deepinfer_plugin.speculative.step_time import Learned, StepTimeCurve

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

pytestmark = pytest.mark.usefixtures("vllm_variables")

CPU = torch.device("cpu")
PROMPTS: Mapping[str, int] = {"a": 10, "b": 10, "c": 10, "p": 50}
CURVE = StepTimeCurve(rows=(1, 64), times_s=(10.0, 10.0 + 63.0))


@pytest.fixture(autouse=True)
def _own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "FIGURES", schedule.ScheduleFigures())


def _output(drafts: Mapping[str, int], prompts: Mapping[str, tuple[int, int]] | None = None) -> SchedulerOutput:
    """A step of decoding requests with so many drafts, and of prompts: tokens computed, tokens of the step."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    going_on = prompts or {}
    output.scheduled_spec_decode_tokens = {name: list(range(count)) for name, count in drafts.items() if count}
    output.num_scheduled_tokens = {name: 1 + count for name, count in drafts.items()} | {
        name: count for name, (_, count) in going_on.items()
    }
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    cached = output.scheduled_cached_reqs
    cached.req_ids = [*drafts, *going_on]
    cached.num_computed_tokens = [20] * len(drafts) + [computed for computed, _ in going_on.values()]
    return output


class Seen:
    """A rule that remembers what it was asked, and answers as it was told."""

    def __init__(self, *lengths: int) -> None:
        self.answer = np.array(lengths, dtype=np.int64)
        self.steps: list[StepDrafts] = []

    def lengths(self, step: StepDrafts) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        self.steps.append(step)
        return self.answer


def _schedule(rule: LengthRule, **confidence: list[float]) -> VerificationSchedule:
    confidences = Confidences(8, 3, CPU)
    confidences.send(list(confidence), torch.tensor(list(confidence.values())).reshape(-1, 3))
    return VerificationSchedule(rule, confidences)


def test_a_cut_plan_is_shorter_and_the_schedulers_own_is_as_before() -> None:
    output = _output({"a": 3, "b": 3, "c": 2})
    found = cut_output(output, {"a": 1, "b": 0, "c": 2})
    assert found.scheduled_spec_decode_tokens == {"a": [0], "c": [0, 1]}
    assert found.num_scheduled_tokens == {"a": 2, "b": 1, "c": 3}
    assert found.total_num_scheduled_tokens == 6
    assert list(found.num_scheduled_tokens) == list(output.num_scheduled_tokens)
    assert output.num_scheduled_tokens == {"a": 4, "b": 4, "c": 3}
    assert output.scheduled_spec_decode_tokens == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1]}


def test_a_rule_sees_confidences_by_request_and_the_rows_that_are_no_drafts() -> None:
    rule = Seen(1, 2)
    found = _schedule(rule, b=[0.5, 0.25, 0.125], a=[1.0, 0.5, 0.5]).cut(
        _output({"a": 2, "c": 0, "b": 3}, {"p": (40, 9)}), PROMPTS.__getitem__
    )
    (step,) = rule.steps
    assert step.confidence.tolist() == [[1.0, 0.5, 0.5], [0.5, 0.25, 0.125]]
    assert step.num_drafts.tolist() == [2, 3]
    assert (step.num_reqs, step.num_sampling, step.num_other_rows) == (4, 3, 3 + 9)
    assert found.num_scheduled_tokens == {"a": 2, "c": 1, "b": 3, "p": 9}


def test_a_prompt_that_ends_in_the_step_gets_a_token() -> None:
    rule = Seen(1)
    _schedule(rule).cut(_output({"a": 1}, {"p": (40, 10)}), PROMPTS.__getitem__)
    assert rule.steps[0].num_sampling == 2


def test_confidences_stay_until_others_come_and_end_with_their_request() -> None:
    rule = Seen(0)
    cutter = _schedule(rule, a=[0.5, 0.5, 0.5], b=[0.75, 0.75, 0.75])
    cutter.cut(_output({"a": 3}), PROMPTS.__getitem__)
    cutter.confidences.send(["a"], torch.tensor([[0.25, 0.25, 0.25]]))
    cutter.cut(_output({"b": 3}), PROMPTS.__getitem__)
    cutter.cut(_output({"a": 3}), PROMPTS.__getitem__)
    assert [step.confidence[0, 0] for step in rule.steps] == [0.5, 0.75, 0.25]
    gone = _output({"b": 3})
    gone.preempted_req_ids, gone.finished_req_ids = {"b"}, {"a"}
    cutter.cut(gone, PROMPTS.__getitem__)
    cutter.cut(_output({"a": 3}), PROMPTS.__getitem__)
    assert [step.confidence[0, 0] for step in rule.steps[3:]] == [0.0, 0.0]


def test_a_step_without_drafts_is_left_as_it_is() -> None:
    rule = Seen()
    output = _output({"a": 0}, {"p": (0, 8)})
    assert _schedule(rule).cut(output, PROMPTS.__getitem__) is output
    assert rule.steps == []


def test_a_step_that_verifies_all_is_left_as_it_is() -> None:
    output = _output({"a": 3})
    assert _schedule(Seen(3)).cut(output, PROMPTS.__getitem__) is output
    assert schedule.FIGURES.steps == 1


def test_figures_count_what_was_left_out() -> None:
    cutter = _schedule(Seen(1, 3))
    cutter.cut(_output({"a": 3, "b": 3}), PROMPTS.__getitem__)
    found = schedule_series.figures()
    assert found["deepinfer_schedule_steps_total"] == 1
    assert found["deepinfer_schedule_cut_steps_total"] == 1
    assert found["deepinfer_schedule_left_out_drafts_total"] == 2
    assert set(found) == {series.name for series in schedule_series.SERIES}


def _step(*confidence: list[float]) -> StepDrafts:
    count = len(confidence)
    return StepDrafts(
        confidence=np.array(confidence, dtype=np.float32),
        num_drafts=np.full(count, 3),
        num_reqs=count,
        num_sampling=count,
        num_other_rows=count,
    )


def test_by_confidence_follows_the_curve_and_what_was_learned() -> None:
    step = _step([0.9, 0.9, 0.9], [0.2, 0.2, 0.2])
    rule = ByConfidence(curve=CURVE)
    assert rule.lengths(step).tolist() == [3, 0]
    rule.learned = Learned(behind_any_s=1e6)  # rows cost nothing beside it
    assert rule.lengths(step).tolist() == [3, 3]
    rule.learned = Learned(slope_s=1e6)  # nothing else costs
    assert rule.lengths(step).tolist() == [0, 0]


def test_random_lengths_repeat_with_their_seed_and_take_all_values() -> None:
    first, second = (np.stack([rule.lengths(_step(*[[1.0] * 3] * 4)) for _ in range(50)]) for rule in _two_random())
    assert np.array_equal(first, second)
    assert set(first.ravel().tolist()) == {0, 1, 2, 3}


def _two_random() -> tuple[RandomLengths, RandomLengths]:
    return RandomLengths(seed=1), RandomLengths(seed=1)


def test_no_lengths_verifies_none() -> None:
    assert NoLengths().lengths(_step([1.0] * 3, [1.0] * 3)).tolist() == [0, 0]
