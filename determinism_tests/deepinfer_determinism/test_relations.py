"""The promise, item by item: rows of the changed schedule have the bits of the probes alone."""

from __future__ import annotations

import pytest

from deepinfer_determinism.harness import Harness
from deepinfer_determinism.results import DIFFERENT, EQUAL, NOT_APPLICABLE
from deepinfer_determinism.session import Case


def test_bits_do_not_depend_on(case: Case, harness: Harness) -> None:
    result = harness.check(case.relation, case.setting, case.name, case.alone_name, case.workload)
    if result.outcome == NOT_APPLICABLE:
        pytest.skip(f"{case.relation.promise}: not applicable on {case.setting.device}: {result.not_applicable}")
    first = result.first_difference
    assert result.outcome != DIFFERENT, (
        f"{case.relation.promise}: {result.differences} of {result.rows_compared} rows differ; first at request "
        f"{first.request if first else ''}, position {first.position if first else 0}: "
        f"got {first.got if first else ''}, alone {first.want if first else ''}"
    )
    missing = {
        name: result.mechanisms.get(name, 0)
        for name, least in case.relation.required.items()
        if result.mechanisms.get(name, 0) < least
    }
    assert result.outcome == EQUAL, f"{case.relation.promise}: not exercised: {missing or 'no row was compared'}"
