"""Every public operation of the kernels keeps the bits of a row in any batch: hypothesis seeks a counterexample."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import deepinfer_kernels
from deepinfer_determinism.coverage import observe
from deepinfer_determinism.harness import Harness
from deepinfer_determinism.operation_cases_cache import OPERATIONS, WITHOUT_ROWS
from deepinfer_determinism.operations import Finding, Layout, Operation, Run, compare_batch, poisoned_memory
from deepinfer_determinism.results import OperationResult

EXAMPLES = {"quick": 2, "full": 12}  # of hypothesis, per operation, variant and size
LAYOUTS = tuple(
    Layout(is_strided=is_strided, has_nan_neighbours=has_nan)
    for is_strided in (False, True)
    for has_nan in (False, True)
)


def public_operations() -> set[str]:
    """``folder.function`` of every function that a folder of the kernels defines in its ``__init__.py``."""
    found = set()
    for path in sorted(Path(deepinfer_kernels.__path__[0]).glob("*/__init__.py")):
        module = importlib.import_module(f"deepinfer_kernels.{path.parent.name}")
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                found.add(f"{path.parent.name}.{name}")
    return found


def test_every_public_operation_has_an_entry() -> None:
    listed = {operation.name for operation in OPERATIONS} | set(WITHOUT_ROWS)
    assert listed == public_operations()


class RowsDifferError(AssertionError):
    """A difference, and not an assertion of anything below, which proves none."""


def explore(operation: Operation, variant: str, examples: int, seed: int, device: str) -> list[Finding]:
    """Try every size of the operation; RowsDifferError at the first difference."""
    torch.set_num_threads(1)  # as the CPU worker does
    findings: list[Finding] = []
    for number, size in enumerate(operation.sizes_of.get(variant, operation.sizes)):
        # what hypothesis tries first is its smallest example: the shift gives that every layout over the sizes
        layouts = LAYOUTS[number % len(LAYOUTS) :] + LAYOUTS[: number % len(LAYOUTS)]
        _explore_size(operation.build, size, variant, layouts, Effort(examples, seed, device), findings)
    return findings


@dataclass(frozen=True, slots=True)
class Effort:
    """Examples of hypothesis, the seed of their inputs, and the device."""

    examples: int
    seed: int
    device: str


def _explore_size(
    build: Callable[[int, str, torch.Generator, str], Run],
    size: int,
    variant: str,
    layouts: Sequence[Layout],
    effort: Effort,
    findings: list[Finding],
) -> None:
    """Let hypothesis choose inputs, batches and layouts."""

    @settings(
        max_examples=effort.examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        generator = torch.Generator().manual_seed(1000 * effort.seed + data.draw(st.integers(0, 1 << 16)))
        layout = data.draw(st.sampled_from(layouts))
        shuffle = data.draw(st.randoms(use_true_random=False))
        with poisoned_memory():
            run = build(size, variant, generator, effort.device)
            alone: dict[int, tuple[torch.Tensor, ...]] = {}
            batches = [list(range(size)), shuffle.sample(range(size), size), shuffle.choices(range(size), k=size + 3)]
            low = shuffle.randrange(size)
            batches.append(list(range(low, size)))
            shuffle.shuffle(batches[2])
            for batch in batches:
                finding = compare_batch(run, batch, layout, alone)
                findings.append(finding)
                if finding.differences:
                    raise RowsDifferError(finding.message)

    check()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_rows_keep_their_bits(
    operation: Operation, harness: Harness, depth: str, device: str, workload_seed: int
) -> None:
    findings: list[Finding] = []
    message = ""
    with observe(deepinfer_kernels.__name__) as reached:
        try:
            for variant in operation.variants:
                findings += explore(operation, variant, EXAMPLES[depth], workload_seed, device)
        except RowsDifferError as error:
            message = str(error).splitlines()[0]
    harness.add_reached(reached)
    harness.add_operation(
        OperationResult(
            operation=operation.name,
            rows_compared=sum(finding.rows for finding in findings),
            batches=len(findings),
            differences=int(bool(message)),
            message=message,
        )
    )
    assert not message, message
    assert sum(finding.rows for finding in findings) > 0
