"""Relations of the promise with drafts, planted faults of verification, and copies of long identifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from deepinfer_determinism import draft_relations, mechanisms
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.draft_relations import FIXED, DraftCase, cases, speculative_flag
from deepinfer_determinism.engine import Children, ScheduleResult
from deepinfer_determinism.harness import compare_probes, make_workload
from deepinfer_determinism.mutants import Mutant
from deepinfer_determinism.mutants_drafts import DRAFT_MUTANTS
from deepinfer_determinism.relations import ALONE, Setting, alone, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload, renamed
from deepinfer_plugin.engine_child.plan import Action, Request

Results = Mapping[str, ScheduleResult]

MUTANTS = "draft mutants"
CONTROL = "control"
NUM_DRAFTS = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drafted" in metafunc.fixturenames:
        option = metafunc.config.getoption
        found = cases(option("--depth"), option("--device"))
        metafunc.parametrize("drafted", found, ids=[case.name for case in found])


@pytest.fixture(scope="module")
def setting(device: str) -> Setting:
    return Setting(checkpoint="nano:0", device=device)


@pytest.fixture(scope="module")
def workload(setting: Setting, depth: str, workload_seed: int) -> Workload:
    return draft_relations.with_outputs(make_workload(setting, "quick", workload_seed), depth)


def _mutant_probes(workload: Workload) -> tuple[Request, ...]:
    """Answers that each fault can change: greedy and drawn, with penalties, and under a grammar."""
    wild = {"temperature": 1.3, "seed": 5, "frequency_penalty": 1.5, "presence_penalty": 1.5}
    return (
        *(probe for probe in workload.probes if probe.name.startswith("bound")),
        *(workload.neighbour(f"wild{number}", 6 + 15 * number, 14, **wild) for number in range(3)),
        workload.neighbour("greedy", 21, 14),
    )


def _mutant_schedules(workload: Workload, setting: Setting) -> list[Schedule]:
    probes = _mutant_probes(workload)
    plain = make_schedule(f"{MUTANTS} {ALONE}", [Action(add=(probe,)) for probe in probes], setting)
    names = (CONTROL, *(mutant.name for mutant in DRAFT_MUTANTS))
    actions = [Action(add=tuple(renamed(probe, name) for probe in probes), reset_prefix_cache=True) for name in names]
    faults = {number: (mutant.fault,) for number, mutant in enumerate(DRAFT_MUTANTS, 1)}
    drafting = make_schedule(MUTANTS, actions, setting, (speculative_flag(NUM_DRAFTS),))
    return [plain, replace(drafting, run=replace(drafting.run, drafter="partly"), action_faults=faults, observe=False)]


@pytest.fixture(scope="module")
def results(setting: Setting, workload: Workload, depth: str, device: str) -> Results:
    """All engines: the one without drafts is the first of a child, so that the drafters behind it know its answers."""
    groups = [[alone(workload, setting), *(case.schedule(workload, setting) for case in cases(depth, device))]]
    if device == "cpu":
        groups.append(_mutant_schedules(workload, setting))
    with Children(device) as children:
        streams = [children.start(group) for group in groups]
        return {result.schedule.name: result for stream in streams for result in stream}


def test_a_probe_keeps_its_bits_with_drafts(drafted: DraftCase, workload: Workload, results: Results) -> None:
    found = results[drafted.name]
    comparison = compare_probes(workload, results[ALONE], found)
    assert comparison.rows > 0
    assert comparison.differences == 0, comparison.first
    counts = mechanisms.count(found)
    missing = {key: counts[key] for key, least in drafted.relation.required.items() if counts[key] < least}
    assert missing == {}
    drafts = found.facts.drafts
    assert drafts["verified"][drafted.num_drafts - 1] > 0
    if drafted.drafter in ("right", "partly"):
        assert drafts["accepted"][drafted.num_drafts - 1] > 0
    if drafted.lengths != FIXED:
        assert drafts["verified"][0] > drafts["verified"][drafted.num_drafts - 1]


def _compare_mutant(name: str, workload: Workload, results: Results) -> Comparison:
    want, got = results[f"{MUTANTS} {ALONE}"], results[MUTANTS]
    total = Comparison()
    for probe in _mutant_probes(workload):
        other = renamed(probe, name)
        given = Given(request=probe, result=want.requests[probe.name])
        total += compare_request(other.name, given, Given(request=other, result=got.requests[other.name]))
    return total


@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_of_verification_is_caught(mutant: Mutant, workload: Workload, results: Results, device: str) -> None:
    if device != "cpu":
        pytest.skip(f"faults are planted in the references, which a CPU runs; the device is {device}")
    assert results[MUTANTS].facts.fault_calls[mutant.fault] > 0, "the changed code did not run"
    assert _compare_mutant(mutant.name, workload, results).differences > 0, mutant.what


def test_the_engine_of_the_faults_is_equal_without_one(workload: Workload, results: Results, device: str) -> None:
    if device != "cpu":
        pytest.skip(f"faults are planted in the references, which a CPU runs; the device is {device}")
    comparison = _compare_mutant(CONTROL, workload, results)
    assert comparison.rows > 50
    assert comparison.differences == 0, comparison.first
