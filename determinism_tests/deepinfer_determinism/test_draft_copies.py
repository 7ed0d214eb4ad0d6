"""Copies of long random identifiers at five drafts: tokens and log-probabilities are those of no drafts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deepinfer_determinism import draft_copies as copies
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.engine import Children, ScheduleResult, checkpoint_folder
from deepinfer_determinism.workload import Sizes, Workload, renamed

CHECKPOINT = "nano:0"
Results = Mapping[str, ScheduleResult]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.build(Sizes.from_model_dir(checkpoint_folder(CHECKPOINT)), 0)


@pytest.fixture(scope="module")
def results(workload: Workload) -> Results:
    with Children("cpu") as children:
        return children.run(copies.schedules(CHECKPOINT, workload))


def _compare(results: Results, workload: Workload, suffix: str) -> Comparison:
    total = Comparison()
    for probe in copies.probes(workload):
        other = renamed(probe, suffix)
        want = Given(request=probe, result=results[copies.PLAIN].requests[probe.name])
        total += compare_request(
            other.name, want, Given(request=other, result=results[copies.COPYING].requests[other.name])
        )
    return total


def test_drafts_change_no_bit_of_a_copy(results: Results, workload: Workload) -> None:
    comparison = _compare(results, workload, copies.CONTROL)
    assert comparison.differences == 0, comparison.first
    assert comparison.rows == sum(probe.max_tokens or 0 for probe in copies.probes(workload))


def test_answers_hold_the_identifiers_and_then_tokens_of_their_own(results: Results, workload: Workload) -> None:
    for probe in copies.probes(workload):
        tokens = results[copies.PLAIN].requests[probe.name].tokens[0].tolist()
        assert tuple(tokens[: len(probe.forced)]) == probe.forced
        assert len(tokens) == len(probe.forced) + copies.NUM_FREE


def test_copies_come_five_drafts_at_a_time_and_end_inside_a_block(results: Results, workload: Workload) -> None:
    facts = [results[copies.COPYING].requests[renamed(p, copies.CONTROL).name].facts for p in copies.probes(workload)]
    brought = [count for fact in facts for count in fact.produced[0][1:]]
    assert brought.count(copies.NUM_DRAFTS + 1) > 4 * len(facts)
    assert sum(1 < count <= copies.NUM_DRAFTS for count in brought) >= len(facts)


def test_a_window_slot_that_a_rejected_draft_leaves_is_caught(results: Results, workload: Workload) -> None:
    assert results[copies.COPYING].facts.fault_calls[copies.STALE] > 0
    assert _compare(results, workload, copies.FAULT).differences > 0
