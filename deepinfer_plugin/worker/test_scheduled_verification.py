"""The hook around a worker: what the runner gets, what is timed, and when the rule learns of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_plugin import metrics
from deepinfer_plugin.speculative.schedule import ByConfidence
from deepinfer_plugin.speculative.step_time import Learned, StepTimeCurve, StepTimeLearner

pytestmark = pytest.mark.usefixtures("vllm_variables")

CURVE = StepTimeCurve(rows=(1, 64), times_s=(1e3, 64e3))  # no draft is worth its row


class _Runner:
    """What vLLM's worker does with a step: it notes the plan, and holds a batch until tokens are drawn."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(np=np.array([4, 4])), req_id_to_index={"a": 0, "b": 1}
        )
        self.noted: dict[str, int] = {}
        self.sampler = SimpleNamespace(drafts=SimpleNamespace(note_drafted=self.noted.update))
        self.speculator = SimpleNamespace(draft_token_confidence_probs=torch.full((2, 3), 0.5))
        self.execute_model_state: Any = None

    def execute_model(self, output: Any) -> str:
        self.plans.append(output)
        batch = SimpleNamespace(req_ids=list(output.num_scheduled_tokens))
        self.execute_model_state = SimpleNamespace(input_batch=batch)
        return "forward"

    def sample_tokens(self, grammar_output: Any) -> str:
        self.execute_model_state = None
        return "tokens"


class _Base:
    def __init__(self) -> None:
        self.model_runner = _Runner()
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=2),
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
        )

    def execute_model(self, output: Any) -> str:
        return self.model_runner.execute_model(output)

    def sample_tokens(self, grammar_output: Any) -> str:
        return self.model_runner.sample_tokens(grammar_output)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    from deepinfer_plugin.worker import scheduled_verification as module

    monkeypatch.setattr(metrics, "PUBLISHER", metrics.Publisher())
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(broadcast_object=lambda value: value))

    class Worker(module.ScheduledVerification, _Base):
        pass

    return Worker()


def _learning(worker: Any) -> ByConfidence:
    from deepinfer_plugin.worker.scheduled_verification import StepClock

    rule = ByConfidence(curve=CURVE)
    worker.choose_lengths(rule)
    worker._learner, worker._clock = StepTimeLearner(CURVE), StepClock(worker.device)
    return rule


def _decode(num_drafts: int) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"a": 1 + num_drafts, "b": 1 + num_drafts}
    output.scheduled_spec_decode_tokens = {name: [-1] * num_drafts for name in "ab"}
    output.total_num_scheduled_tokens = 2 + 2 * num_drafts
    output.scheduled_cached_reqs.req_ids = ["a", "b"]
    output.scheduled_cached_reqs.num_computed_tokens = [8, 8]
    return output


def test_without_a_schedule_the_plan_passes_through(worker: Any) -> None:
    output = _decode(3)
    assert worker.execute_model(output) == "forward"
    assert worker.sample_tokens(None) == "tokens"
    assert worker.model_runner.plans == [output]


def test_the_runner_gets_the_cut_plan(worker: Any) -> None:
    worker.choose_lengths(ByConfidence(curve=CURVE))
    output = _decode(3)
    assert worker.execute_model(output) == "forward"
    assert worker.sample_tokens(None) == "tokens"
    assert worker.model_runner.plans[0].num_scheduled_tokens == {"a": 1, "b": 1}
    assert worker.model_runner.noted == {"a": 3, "b": 3}
    assert output.num_scheduled_tokens == {"a": 4, "b": 4}


def test_confidences_of_a_step_reach_the_next_one(worker: Any) -> None:
    worker.choose_lengths(ByConfidence(curve=CURVE))
    worker.execute_model(_decode(0))
    worker.sample_tokens(None)
    worker.verification.confidences.receive()
    assert worker.verification.confidences.of(["b", "a"]).tolist() == [[0.5] * 3] * 2


def test_the_rule_learns_in_intervals(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugin.worker import scheduled_verification as module

    rule = _learning(worker)
    monkeypatch.setattr(worker._clock, "intervals_s", lambda: (2.0, 1e6))
    for step in range(module.LEARN_EVERY + 1):
        assert rule.learned == Learned(), step
        worker.execute_model(_decode(3))
        worker.sample_tokens(None)
    assert rule.learned.behind_s == {2: 1e6}
    worker.execute_model(_decode(3))
    # beside a million seconds behind the forward pass a row of a thousand is cheap
    assert worker.model_runner.plans[-1].num_scheduled_tokens == {"a": 4, "b": 4}


def test_steps_with_prompts_teach_nothing(worker: Any) -> None:
    rule = _learning(worker)
    for _ in range(70):
        output = _decode(0)
        output.num_scheduled_tokens["b"] = 2
        worker.execute_model(output)
        worker.sample_tokens(None)
    assert rule.learned == Learned()


def test_the_clock_measures_both_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_plugin.worker import scheduled_verification as module

    times_s = iter([1.0, 3.0, 7.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(times_s)))
    clock = module.StepClock(torch.device("cpu"))
    for point in range(3):
        clock.mark(point)
    assert clock.intervals_s() == (2.0, 4.0)
