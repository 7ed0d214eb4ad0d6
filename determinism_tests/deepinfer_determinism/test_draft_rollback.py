"""What rejected drafts leave is never read: every number of accepted ones, every place of a page, hits, preemption."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deepinfer_determinism import draft_rollback as rollback
from deepinfer_determinism.cache_states import KINDS, kind_of
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.engine import Children, ScheduleResult, checkpoint_folder
from deepinfer_determinism.workload import Sizes, Workload

CHECKPOINT = "nano:0"
Results = Mapping[str, ScheduleResult]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.build(Sizes.from_model_dir(checkpoint_folder(CHECKPOINT)), 0)


@pytest.fixture(scope="module")
def results(workload: Workload) -> Results:
    with Children("cpu") as children:
        return children.run(rollback.schedules(CHECKPOINT, workload))


def _compare(results: Results, run: str, suffix: str = "") -> Comparison:
    """Requests of an engine with the same of the engine without drafts; those under a fault have a suffix."""
    total, plain = Comparison(), results[rollback.PLAIN]
    for name, request in results[run].schedule.requests.items():
        base, _, own_suffix = name.partition("@")
        if own_suffix == suffix:
            other = f"{base}@{rollback.PLAIN}" if suffix else base
            want = Given(request=plain.schedule.requests[other], result=plain.requests[other])
            total += compare_request(name, want, Given(request=request, result=results[run].requests[name]))
    return total


def _differing_kinds(results: Results, run: str, name: str) -> tuple[int, set[str]]:
    """States that both engines have seen, and kinds of cache of which one differs."""
    plain, found = (
        results[engine].facts.observed[rollback.observer(observed)]
        for engine, observed in ((rollback.PLAIN, rollback.PLAIN), (run, name))
    )
    common = plain.keys() & found.keys()
    return len(common), {kind_of(key) for key in common if plain[key] != found[key]}


@pytest.mark.parametrize("run", [rollback.SYSTEMATIC, rollback.PREEMPTED])
def test_every_row_has_the_bits_of_no_drafts(run: str, results: Results) -> None:
    comparison = _compare(results, run)
    assert comparison.differences == 0, comparison.first
    assert comparison.rows >= rollback.NUM_OF_KIND * rollback.NUM_OUTPUTS + 9 * rollback.NUM_FOLLOWERS


@pytest.mark.parametrize("run", [rollback.SYSTEMATIC, rollback.PREEMPTED])
def test_every_record_that_a_step_may_read_has_the_bytes_of_no_drafts(run: str, results: Results) -> None:
    num_common, kinds = _differing_kinds(results, run, run)
    assert kinds == set()
    assert num_common > 100 * len(KINDS)


@pytest.mark.parametrize("period", [2, 8, rollback.PAGE])
def test_every_number_of_drafts_was_accepted_at_every_position(period: int, results: Results) -> None:
    counts = rollback.accepted_at(results[rollback.SYSTEMATIC], rollback.NUM_DRAFTS)
    assert rollback.missing_pairs(list(counts), period, rollback.NUM_DRAFTS) == []


def test_prompts_hit_pages_that_drafts_have_filled(workload: Workload, results: Results) -> None:
    for request in rollback.followers(workload):
        cached = results[rollback.SYSTEMATIC].requests[request.name].facts.num_cached_tokens
        assert cached > len(request.tokens) - rollback.REPEATED, (request.name, cached)


def test_requests_were_preempted_between_drafts(results: Results) -> None:
    requests = results[rollback.PREEMPTED].requests
    assert sum(request.facts.num_preemptions > 0 for request in requests.values()) >= 2
    assert sum(results[rollback.PREEMPTED].facts.drafts["accepted"]) > 100


@pytest.mark.parametrize("fault", rollback.FAULTS)
def test_a_record_that_a_rejected_draft_leaves_shows_in_rows_and_in_its_cache(fault: str, results: Results) -> None:
    assert results[rollback.SYSTEMATIC].facts.fault_calls[rollback.fault_path(fault)] > 0
    assert _compare(results, rollback.SYSTEMATIC, fault).differences > 0
    assert rollback.FAULTS[fault] in _differing_kinds(results, rollback.SYSTEMATIC, fault)[1]
