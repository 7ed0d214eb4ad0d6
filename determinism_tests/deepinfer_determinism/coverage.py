"""Counts which side of every threshold was reached, without changing what a call does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from deepinfer_determinism.patching import Function, load_model_modules, replaced
from deepinfer_determinism.results import CoverageRow
from deepinfer_determinism.thresholds import THRESHOLDS, Threshold
from deepinfer_determinism.thresholds_device import DEVICE_THRESHOLDS

Reached = dict[str, list[int]]
ALL = THRESHOLDS + DEVICE_THRESHOLDS


def thresholds_on(device: str) -> tuple[Threshold, ...]:
    """Thresholds that a run on a device of this type, ``cpu`` or ``cuda``, comes to."""
    return tuple(threshold for threshold in ALL if threshold.is_on(device))


@contextmanager
def observe(package: str = "") -> Iterator[Reached]:
    """While active, count ``[below, above]`` for every threshold by name.

    Args:
        package: count only choices of this package, and load nothing else; empty for all.
    """
    if not package:
        load_model_modules()
    watched = [threshold for threshold in ALL if threshold.function.startswith(package)]
    reached: Reached = {threshold.name: [0, 0] for threshold in watched}
    by_function: dict[str, list[Threshold]] = {}
    for threshold in watched:
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


def coverage_rows(counts: Iterable[Mapping[str, tuple[int, int]]], device: str) -> tuple[CoverageRow, ...]:
    """Sums over engines and operations, one row per threshold of the device."""
    thresholds = thresholds_on(device)
    total: Reached = {threshold.name: [0, 0] for threshold in thresholds}
    for reached in counts:
        for name in total.keys() & reached.keys():
            below, above = reached[name]
            total[name][0] += below
            total[name][1] += above
    return tuple(
        CoverageRow(
            name=threshold.name,
            where=threshold.where,
            value=threshold.value,
            below=total[threshold.name][0],
            above=total[threshold.name][1],
            unreachable=threshold.unreachable,
        )
        for threshold in thresholds
    )
