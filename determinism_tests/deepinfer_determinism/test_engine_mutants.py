"""Every fault planted in the engine runs and is caught by a relation; the same schedules without fault are equal."""

from __future__ import annotations

import pytest

from deepinfer_determinism.draft_mutant_runs import CONTROL as DRAFT_CONTROL
from deepinfer_determinism.draft_mutant_runs import DRAFTING, PLAIN, compare_draft_mutant
from deepinfer_determinism.harness import Harness
from deepinfer_determinism.image_mutant_runs import CHANGES, SCHEDULE
from deepinfer_determinism.image_mutant_runs import CONTROL as IMAGE_CONTROL
from deepinfer_determinism.mutant_runs import CONTROL, ENGINES, compare_mutant, schedule_name
from deepinfer_determinism.mutants import Mutant
from deepinfer_determinism.mutants_drafts import DRAFT_MUTANTS
from deepinfer_determinism.mutants_engine import ENGINE_MUTANTS
from deepinfer_determinism.mutants_images import IMAGE_MUTANTS
from deepinfer_determinism.results import MutantResult


@pytest.fixture(autouse=True)
def _on_the_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip(f"faults are planted in the references, which a CPU runs; the device is {device}")


@pytest.mark.parametrize("mutant", ENGINE_MUTANTS + IMAGE_MUTANTS + DRAFT_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_relation_catches(mutant: Mutant, harness: Harness) -> None:
    if mutant in DRAFT_MUTANTS:
        result = harness.result(DRAFTING)
        comparison = compare_draft_mutant(mutant.name, harness.result(PLAIN), result)
    else:
        result = harness.result(schedule_name(mutant.engine))
        comparison = compare_mutant(mutant.name, result)
    ran = result.facts.fault_calls.get(mutant.fault, 0)
    harness.add_mutant(
        MutantResult(
            name=mutant.name,
            ran=ran,
            caught_by=mutant.relation if comparison.differences > 0 else None,
            what=mutant.what,
            rows_compared=comparison.rows,
            differences=comparison.differences,
        )
    )
    assert ran > 0, f"{mutant.name}: the changed code did not run"
    assert comparison.differences > 0, f"{mutant.name}: missed by relation {mutant.relation}: {mutant.what}"


@pytest.mark.parametrize("mutant", ENGINES)
def test_the_schedules_of_the_mutants_are_equal_without_fault(mutant: str, harness: Harness) -> None:
    comparison = compare_mutant(f"{CONTROL} {mutant}", harness.result(schedule_name(mutant)))
    assert comparison.rows > 0 or mutant == "logprobs"
    assert comparison.differences == 0, comparison.first


@pytest.mark.parametrize("relation", CHANGES)
def test_images_without_fault_change_nothing(relation: str, harness: Harness) -> None:
    comparison = compare_mutant(f"{IMAGE_CONTROL} {relation}", harness.result(SCHEDULE))
    assert comparison.rows > 0
    assert comparison.differences == 0, comparison.first


def test_drafts_without_fault_change_nothing(harness: Harness) -> None:
    comparison = compare_draft_mutant(DRAFT_CONTROL, harness.result(PLAIN), harness.result(DRAFTING))
    assert comparison.rows > 50
    assert comparison.differences == 0, comparison.first
