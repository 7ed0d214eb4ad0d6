"""Every fault planted in an operation runs and is caught by the row property of that operation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from deepinfer_determinism.harness import Harness
from deepinfer_determinism.mutants import Mutant
from deepinfer_determinism.mutants_operations import OPERATION_MUTANTS
from deepinfer_determinism.operation_cases_cache import OPERATIONS
from deepinfer_determinism.results import MutantResult
from deepinfer_determinism.test_operations import EXAMPLES, RowsDifferError, explore

BY_NAME = {operation.name: operation for operation in OPERATIONS}


def load_fault(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("fault", OPERATION_MUTANTS, ids=lambda fault: fault.name)
def test_the_row_property_catches(fault: Mutant, harness: Harness, workload_seed: int) -> None:
    message = ""
    with load_fault(fault.fault)() as calls:
        try:
            explore(BY_NAME[fault.operation], fault.variant, EXAMPLES["quick"], workload_seed, "cpu")
        except RowsDifferError as error:
            message = str(error).splitlines()[0]
    harness.add_mutant(
        MutantResult(
            name=fault.name,
            ran=calls.calls,
            caught_by=fault.catcher if message.startswith("unit ") else None,
            what=fault.what,
            rows_compared=1,
            differences=int(bool(message)),
        )
    )
    assert calls.calls > 0, f"{fault.name}: the changed code did not run"
    assert message.startswith("unit "), f"{fault.name}: missed by operation {fault.operation}: {fault.what} {message}"
