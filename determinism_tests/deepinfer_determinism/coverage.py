"""Counts which side of every threshold was reached, without changing what a call does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from deepinfer_determinism.patching import Function, load_model_modules, replaced
from deepinfer_determinism.results import CoverageRow
from deepinfer_determinism.thresholds import THRESHOLDS, Threshold

Reached = dict[str, list[int]]


@contextmanager
def observe() -> Iterator[Reached]:
    """While active, count ``[below, above]`` for every threshold by name."""
    load_model_modules()
    reached: Reached = {threshold.name: [0, 0] for threshold in THRESHOLDS}
    by_function: dict[str, list[Threshold]] = {}
    for threshold in THRESHOLDS:
        by_function.setdefault(threshold.function, []).append(threshold)
    with ExitStack() as stack:
        for path, thresholds in by_function.items():
            stack.enter_context(replaced(path, _counting(thresholds, reached)))
        yield reached


def _counting(thresholds: list[Threshold], reached: Reached) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        signature = inspect.signature(original)

        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            for threshold in thresholds:
                for side in threshold.sides(arguments):
                    reached[threshold.name][int(side)] += 1
            return original(*args, **kwargs)

        return counted

    return make


def coverage_rows(counts: Iterable[Mapping[str, tuple[int, int]]]) -> tuple[CoverageRow, ...]:
    """Sums over engines, one row per threshold."""
    total: Reached = {threshold.name: [0, 0] for threshold in THRESHOLDS}
    for reached in counts:
        for name, (below, above) in reached.items():
            total[name][0] += below
            total[name][1] += above
    return tuple(
        CoverageRow(
            name=threshold.name,
            where=threshold.where,
            value=threshold.value,
            below=total[threshold.name][0],
            above=total[threshold.name][1],
        )
        for threshold in THRESHOLDS
    )
