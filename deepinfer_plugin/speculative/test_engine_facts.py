"""Facts of drafts come with the answer of the request that asks, and agree with the tokens and with the counters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.drafters import said_confidence
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.speculative.test_engine_drafts import NUM_DRAFTS, speculative_flag

Results = Mapping[str, RunResult]

FAULT = "deepinfer_plugin.speculative.record_faults:confidence_of_the_row"
ASKS: Mapping[str, Any] = {"extra_args": {"draft_facts": True}}
NUM_OUTPUT = 18
# What asks differs in length, so that requests end at different steps and rows of a batch are not slots.
SAMPLING: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "short": (5, ASKS),
    "silent": (9, {}),
    "drawn": (NUM_OUTPUT, {**ASKS, "temperature": 1.0, "seed": 7}),
    "sums": (NUM_OUTPUT, {"extra_args": {"draft_facts": True, "sum_smaller_probs": True}, "logprobs": 2}),
    "few scores": (NUM_OUTPUT, {**ASKS, "logprobs": None}),
    "stopped": (NUM_OUTPUT, {**ASKS, "temperature": 2.0, "seed": 5, "stop_token_ids": list(range(10, 60))}),
    "one token": (1, ASKS),
}
RUNS: Mapping[str, tuple[str | None, str | None]] = {
    "right": ("right", None),
    "wrong": ("wrong", None),
    "partly": ("partly", None),
    "ragged": ("partly", "random"),
    "n-grams": (None, None),
}


def _requests() -> tuple[Request, ...]:
    return tuple(
        Request(
            name=name,
            tokens=tuple(range(20 + 7 * number, 29 + 11 * number)),
            max_tokens=max_tokens,
            sampling=sampling,
        )
        for number, (name, (max_tokens, sampling)) in enumerate(SAMPLING.items())
    )


def _run(name: str, model: Path, num_drafts: int, *kinds: str | None, faults: tuple[str, ...] = ()) -> EngineRun:
    drafter, lengths = kinds or (None, None)
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=("--block-size=32", "--max-num-seqs=5", *([speculative_flag(num_drafts)] if num_drafts else [])),
        actions=(Action(add=_requests()),),
        drafter=drafter,
        lengths=lengths,
        faults=faults,
    )


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    """All engines; the one without drafts is first, so that drafters know its answers."""
    model = checkpoint("nano", 0)
    runs = [_run("off", model, 0), *(_run(name, model, NUM_DRAFTS, *kinds) for name, kinds in RUNS.items())]
    runs.append(_run("fault", model, NUM_DRAFTS, "partly", None, faults=(FAULT,)))
    return run_engines(runs)


def _steps(results: Results, run: str) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Facts by request, of those that asked."""
    facts = {name: request.facts.draft_facts for name, request in results[run].requests.items()}
    return {name: steps for name, steps in facts.items() if steps is not None}


def _said(results: Results, run: str) -> tuple[list[Any], list[Any]]:
    """Confidences as the answers have them, and as the drafter said them of the tokens so far."""
    prompts = {request.name: request.tokens for request in _requests()}
    found, want = [], []
    for name, steps in _steps(results, run).items():
        answer, done = results[run].requests[name].tokens[0].tolist(), 0
        for step in steps:
            found.append(step["confidence_score"])
            said = said_confidence([*prompts[name], *answer[:done]], NUM_DRAFTS) if done else ()
            want.append([float(value) for value in said[: step["drafted"]]])
            done += step["accepted"] + 1
    return found, want


@pytest.mark.parametrize("run", RUNS)
def test_facts_come_to_those_who_ask_and_change_no_answer(run: str, results: Results) -> None:
    off, on = results["off"].requests, results[run].requests
    assert sorted(_steps(results, run)) == sorted(set(SAMPLING) - {"silent"})
    for name, want in off.items():
        assert want.facts.error is None, (name, want.facts.error)
        assert want.tokens[0].tolist() == on[name].tokens[0].tolist(), name
        assert_bitwise_equal(on[name].logits[0], want.logits[0], f"{run}, {name}")


@pytest.mark.parametrize("run", RUNS)
def test_steps_add_up_to_the_answer(run: str, results: Results) -> None:
    for name, steps in _steps(results, run).items():
        num_tokens = len(results[run].requests[name].tokens[0])
        assert all(step["drafted"] >= step["verified"] >= step["accepted"] for step in steps), name
        assert run == "ragged" or all(step["drafted"] == step["verified"] for step in steps), name
        total = sum(step["accepted"] + 1 for step in steps)
        assert total - steps[-1]["accepted"] <= num_tokens <= total, name
        chunks = (
            results[run].requests[name].facts.chunks[0]
        )  # as scheduled: the prompt, then a row for each draft and one
        assert [step["drafted"] + 1 for step in steps[1:]] == list(chunks[1:]), name
        assert steps[0] == {"drafted": 0, "verified": 0, "accepted": 0, "confidence_score": []}, name


def test_without_drafts_there_are_no_facts(results: Results) -> None:
    assert set(_steps(results, "off").values()) == {()}


def test_a_drafter_that_is_always_right_has_all_verified_drafts_accepted(results: Results) -> None:
    for name, steps in _steps(results, "right").items():
        assert all(step["accepted"] == step["verified"] for step in steps[:-1]), name
    drawn = _steps(results, "right")["drawn"]
    assert [step["verified"] for step in drawn] == [0, 5, 5, 5]


def test_a_drafter_that_is_always_wrong_has_none(results: Results) -> None:
    steps = [step for steps in _steps(results, "wrong").values() for step in steps]
    assert {step["accepted"] for step in steps} == {0}
    assert {step["verified"] for step in steps} >= {0, 5}


@pytest.mark.parametrize("run", ["right", "wrong", "partly", "ragged"])
def test_confidences_are_those_of_the_drafts_that_the_step_verified(run: str, results: Results) -> None:
    found, want = _said(results, run)
    assert found == want
    assert sum(len(values) for values in found) > 30


def test_confidences_of_the_row_instead_of_the_slot_are_noticed(results: Results) -> None:
    found, want = _said(results, "fault")
    assert results["fault"].facts.fault_calls[FAULT] > 0
    assert found != want


def test_drafts_of_n_grams_have_no_confidence(results: Results) -> None:
    steps = [step for steps in _steps(results, "n-grams").values() for step in steps]
    assert sum(step["verified"] for step in steps) > 5
    assert all(step["confidence_score"] == [] for step in steps)
    assert results["n-grams"].facts.confidence_error == ()


def _counted(steps: list[Mapping[str, Any]], kind: str) -> list[int]:
    return [sum(step[kind] > place for step in steps) for place in range(NUM_DRAFTS)]


@pytest.mark.parametrize("run", ["right", "wrong", "partly", "ragged"])
def test_counters_are_the_sum_of_the_facts(run: str, results: Results) -> None:
    """All requests of the run but one ask; the counters also hold that one's steps."""
    steps = [step for steps in _steps(results, run).values() for step in steps]
    counted = results[run].facts.drafts
    silent = results[run].requests["silent"].facts.chunks[0][1:]
    for kind in ("drafted",) if run == "ragged" else ("drafted", "verified"):
        own = [sum(rows - 1 > place for rows in silent) for place in range(NUM_DRAFTS)]
        assert [a + b for a, b in zip(_counted(steps, kind), own, strict=True)] == list(counted[kind])
    for kind in ("verified", "accepted"):
        assert all(a <= b for a, b in zip(_counted(steps, kind), counted[kind], strict=True))
