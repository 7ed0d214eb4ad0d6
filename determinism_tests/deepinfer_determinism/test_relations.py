"""The promise, item by item: rows of the changed schedule have the bits of the probes alone."""

from __future__ import annotations

import pytest

from deepinfer_determinism.cases import Case
from deepinfer_determinism.configurations import SEGMENT
from deepinfer_determinism.harness import Harness, compare_probes
from deepinfer_determinism.results import DIFFERENT, EQUAL, NOT_APPLICABLE
from deepinfer_determinism.session import Plan, make_plan


def test_bits_do_not_depend_on(case: Case, harness: Harness) -> None:
    result = harness.check(case)
    if result.outcome == NOT_APPLICABLE:
        pytest.skip(f"{case.relation.promise}: not applicable here: {result.not_applicable}")
    first = result.first_difference
    assert result.outcome != DIFFERENT, (
        f"{case.relation.promise}: {result.differences} of {result.rows_compared} rows differ; first at request "
        f"{first.request if first else ''}, position {first.position if first else 0}: "
        f"got {first.got if first else ''}, alone {first.want if first else ''}"
    )
    missing = {
        name: result.mechanisms.get(name, 0)
        for name, least in case.required.items()
        if result.mechanisms.get(name, 0) < least
    }
    assert result.outcome == EQUAL, f"{case.relation.promise}: not exercised: {missing or 'no row was compared'}"


def test_configurations_that_are_other_functions_differ(plan: Plan, harness: Harness) -> None:
    """With replay on, under its two policies, and without: three functions of the prompt, or a variable did nothing."""
    by_label = {case.configuration.label: case.configuration for case in plan.cases}
    labels = ("", "replay exact", f"replay {SEGMENT}")
    if not set(labels) <= set(by_label):
        pytest.skip("--relation left out a configuration that this compares")
    without, exact, segment = (by_label[label] for label in labels)
    harness.start([item.alone for item in (without, exact, segment)])
    rows = [harness.result(item.alone_name) for item in (without, exact, segment)]
    workload = exact.workload
    assert compare_probes(workload, rows[1], rows[2]).differences > 0
    assert compare_probes(workload, rows[0], rows[1]).differences > 0


def test_one_selected_relation_leaves_the_comparison_out(plan: Plan, harness: Harness) -> None:
    """``run --relation order`` must be able to pass."""
    chosen = make_plan(plan.options, ["order"])
    assert chosen.cases
    with pytest.raises(pytest.skip.Exception):
        test_configurations_that_are_other_functions_differ(chosen, harness)
