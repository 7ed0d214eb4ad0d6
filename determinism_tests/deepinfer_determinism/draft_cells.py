"""What the matrix of drafts gave: rows compared in every cell, and whether its circumstance and its drafts happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.draft_matrix import (
    CHUNKED,
    FIXED,
    HIT,
    KINDS,
    PLAIN,
    PREEMPTED,
    SIZES,
    STRUCTURED,
    Combination,
    circumstance_of,
    compared,
    kind_of,
)
from deepinfer_determinism.engine import ScheduleResult
from deepinfer_determinism.results import FirstDifference
from deepinfer_determinism.workload import base_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of drafts and schedule, in one circumstance, greedy or drawn.

    ``happened`` counts the requests of the cell that were in the circumstance, of the engine for preemptions.
    """

    combination: Combination
    circumstance: str
    kind: str
    rows: int
    differences: int
    happened: int
    first: FirstDifference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixResult:
    """All cells, and by engine what its drafts did: verified and accepted by position, shortened verifications."""

    cells: tuple[Cell, ...]
    drafts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Generated tokens with drafts on whose log-probabilities and ids were compared."""
        return sum(cell.rows for cell in self.cells if cell.combination.num_drafts > 0)

    @property
    def differences(self) -> int:
        """Rows that differ, in any cell."""
        return sum(cell.differences for cell in self.cells)

    def faults(self) -> list[str]:
        """Everything by which the matrix is not what it should be, in words; empty: no difference, all was there."""
        found = []
        for cell in self.cells:
            name = f"{cell.combination.name}, {cell.circumstance}, {cell.kind}"
            if cell.differences > 0:
                found.append(f"{name}: {cell.differences} of {cell.rows} rows differ, first {cell.first}")
            if cell.happened == 0 or cell.rows == 0:
                found.append(f"{name}: not exercised: {cell.happened} requests, {cell.rows} rows")
        for name, counts in self.drafts.items():
            missing = [key for key, least in counts["required"].items() if counts[key] < least]
            found += [f"{name}: not exercised: {key} is {counts[key]}" for key in missing]
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"rows": self.rows, "differences": self.differences, **asdict(self)}


def compare_matrix(results: Mapping[str, ScheduleResult], depth: str) -> MatrixResult:
    """Compare every engine of a depth with the plain one."""
    cells: list[Cell] = []
    drafts: dict[str, Mapping[str, Any]] = {}
    for combination in SIZES[depth].combinations:
        result = results[combination.name]
        for circumstance in SIZES[depth].circumstances:
            of = results[combination.preempted_name] if circumstance == PREEMPTED else result
            cells += _cells(combination, results[PLAIN], of, circumstance)
        if combination.num_drafts > 0:
            drafts[combination.name] = _drafts(combination, result)
    return MatrixResult(cells=tuple(cells), drafts=drafts)


def _cells(
    combination: Combination, plain: ScheduleResult, result: ScheduleResult, circumstance: str
) -> Sequence[Cell]:
    found = []
    for kind in KINDS:
        total, names = Comparison(), []
        for request in compared(result.schedule):
            name = request.name
            if (circumstance_of(name), kind_of(name)) == (circumstance, kind):
                names.append(name)
                base = base_name(name)
                total += compare_request(
                    name,
                    Given(request=plain.schedule.requests[base], result=plain.requests[base]),
                    Given(request=request, result=result.requests[name]),
                )
        found.append(
            Cell(
                combination=combination,
                circumstance=circumstance,
                kind=kind,
                rows=total.rows,
                differences=total.differences,
                happened=_happened(circumstance, result, names),
                first=total.first,
            )
        )
    return found


def _happened(circumstance: str, result: ScheduleResult, names: Sequence[str]) -> int:
    """Requests of a cell that were cut into chunks, hit, preempted beside others, or bound by a grammar."""
    facts = {name: result.requests[name].facts for name in names}
    if circumstance == CHUNKED:
        lengths = {request.name: len(request.tokens) for request in compared(result.schedule)}
        return sum(fact.chunks[0][0] < lengths[name] for name, fact in facts.items())
    if circumstance == HIT:
        return sum(fact.num_cached_tokens > 0 for fact in facts.values())
    if circumstance == PREEMPTED:  # whoever came last goes first, so not every kind does
        return sum(request.facts.num_preemptions for request in result.requests.values())
    assert circumstance == STRUCTURED
    # every token is one byte; in front of them the text may hold a character that the prompt had begun
    num_tokens = {name: len(result.requests[name].tokens[0]) for name in names}
    return sum(_is_printable(fact.outputs[0].text[-num_tokens[name] :]) for name, fact in facts.items())


def _is_printable(text: str) -> bool:
    """Whether an answer has only what every one of ``GRAMMARS`` allows: ASCII from the space to the tilde."""
    return bool(text) and text.isascii() and text.isprintable()


def _drafts(combination: Combination, result: ScheduleResult) -> Mapping[str, Any]:
    """Counts of an engine's drafts by mechanism, and the least that each must be."""
    counted = m.count(result)
    required = {m.VERIFIED_AT_ONCE: combination.num_drafts, m.ACCEPTED_DRAFTS: 1, m.REJECTED_DRAFTS: 1}
    if combination.schedule != FIXED and combination.num_drafts > 1:
        required[m.SHORTENED] = 1
    return {**{key: counted[key] for key in (*required, m.SHORTENED)}, **result.facts.drafts, "required": required}
