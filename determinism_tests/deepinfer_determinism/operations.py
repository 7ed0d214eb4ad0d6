"""The row property of an operation: a row in a batch has the bits it has alone, whatever surrounds it.

Operations run on fp32 activations, so that no last rounding hides a difference. ``operation_cases.py`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

Outputs = Sequence[tuple[torch.Tensor, ...]]  # per unit, in the order in which they were asked for
Run = Callable[[Sequence[int], "Layout"], Outputs]
ALONE_AT_MOST = 24  # units of a large batch that are also computed alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the rows of a call lie in memory, and what lies beside them; none of it may matter.

    Attributes:
        is_strided: rows are every second one of a wider buffer whose rest is NaN.
        has_nan_neighbours: the call begins and ends with a row of NaN that nobody reads.
    """

    is_strided: bool = False
    has_nan_neighbours: bool = False


PLAIN = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One public operation and a maker of inputs.

    Attributes:
        name: ``folder.function``.
        build: from a number of units (rows, or requests where rows of one request meet) to a function that runs some
            of them, in any order, in one call.
        variants: names of input makers beside each other: formats, optional arguments.
        sizes: numbers of units around the thresholds of this operation.
        sizes_of: the same for a variant with thresholds of its own.
    """

    name: str
    build: Callable[[int, str, torch.Generator, str], Run]
    variants: tuple[str, ...] = ("",)
    sizes: tuple[int, ...] = (1, 2, 15, 16, 17, 31, 33, 64, 65)
    sizes_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows compared, rows that differ, and the first difference in words."""

    rows: int
    differences: int
    message: str = ""


def rowwise(
    inputs: Mapping[str, torch.Tensor], rows: Sequence[str], call: Callable[[Mapping[str, torch.Tensor]], Any]
) -> Run:
    """A runner for an operation whose units are rows of the named inputs, and of its results."""

    def run(selection: Sequence[int], layout: Layout) -> Outputs:
        index = torch.tensor(list(selection), dtype=torch.int64)
        chosen = dict(inputs)
        for name in rows:
            chosen[name] = laid_out(inputs[name][index.to(inputs[name].device)], layout)
        result = call(chosen)
        results = result if isinstance(result, tuple) else (result,)
        shift = int(layout.has_nan_neighbours)
        return [tuple(tensor[shift + unit] for tensor in results) for unit in range(len(index))]

    return run


def laid_out(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The rows, with neighbours and strides as the layout says; integers get copies of a row as neighbours."""
    if layout.has_nan_neighbours:
        neighbour = _nan_like(rows[:1])
        rows = torch.cat([neighbour, rows, neighbour])
    if not layout.is_strided:
        return rows.contiguous()
    wide = _nan_like(rows.repeat_interleave(2, dim=0))
    view = wide[::2]
    view.copy_(rows)
    return view


def _nan_like(rows: torch.Tensor) -> torch.Tensor:
    if not rows.is_floating_point():
        return rows.clone()
    if rows.dtype == torch.float8_e4m3fn:
        return torch.full(rows.shape, 0x7F, dtype=torch.uint8, device=rows.device).view(torch.float8_e4m3fn)
    return torch.full_like(rows, float("nan"))


def compare_batch(
    run: Run, selection: Sequence[int], layout: Layout, alone: dict[int, tuple[torch.Tensor, ...]]
) -> Finding:
    """Run a batch and compare its units with the same units alone.

    Args:
        run: of one set of inputs.
        selection: units of the batch, in its order; may repeat.
        layout: of the batch.
        alone: results alone so far, filled on demand.
    """
    outputs = run(selection, layout)
    rows = differences = 0
    message = ""
    for place, unit in enumerate(selection):
        if unit not in alone:
            if len(alone) >= ALONE_AT_MOST:
                continue
            alone[unit] = tuple(run([unit], PLAIN)[0])
        rows += 1
        for number, (got, want) in enumerate(zip(outputs[place], alone[unit], strict=True)):
            found = _difference(got, want)
            if found is not None:
                differences += 1
                message = message or f"unit {unit} at place {place} of {len(selection)}, result {number}: {found}"
                break
    return Finding(rows=rows, differences=differences, message=message)


def _difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"got {list(got.shape)} {got.dtype}, alone {list(want.shape)} {want.dtype}"
    differs = _bits(got) != _bits(want)
    if want.is_floating_point() and want.dtype != torch.float8_e4m3fn:
        differs |= want.contiguous().isnan().flatten()  # no operation here gives NaN for the inputs it gets
    if not bool(differs.any()):
        return None
    index = int(differs.nonzero()[0])
    values = [tensor.flatten()[index].to(torch.float64).item() for tensor in (got, want)]
    return f"{int(differs.sum())} of {differs.numel()} elements differ, got {values[0]!r}, alone {values[1]!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size).flatten()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New uninitialised memory holds NaN, or 0xAA bytes."""
    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, _poisoned(getattr(owner, name))))
        yield


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        if tensor.numel() > 0 and tensor.is_contiguous():
            tensor.view(-1).view(torch.uint8).fill_(0xAA)
        return tensor

    return allocate_poisoned
