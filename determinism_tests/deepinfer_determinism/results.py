"""What a run of the harness found, as data: written by the relations and mutants, read by certificate and report.

Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_plugin.errors import InputError

FORMAT = 1  # of the JSON text; raised when a field changes its meaning

EQUAL, DIFFERENT, NOT_EXERCISED, NOT_APPLICABLE = "equal", "different", "not exercised", "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first row that differs: lowest request in the order of the schedule, then lowest position.

    Attributes:
        request: name of the request, the same in both runs.
        position: the row that predicts the token at ``position + 1``; 0 is the row of the first prompt token.
        got: what the compared run has there, readable: a token id, or a logit with its column and bits.
        want: what the run it is compared with has there.
    """

    request: str
    position: int
    got: str
    want: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationResult:
    """One relation in one configuration.

    Attributes:
        relation: name of the relation, see ``relations.RELATIONS``.
        configuration: checkpoint, arithmetic, device and flags, as one line.
        rows_compared: rows of full-vocabulary fp32 logits, one per (request, position).
        differences: rows among them with a differing bit or token; missing rows count as differing.
        first_difference: None where there is none.
        mechanisms: how often what the relation is about happened, by name; what is required is in the relation.
        exercised: every required mechanism happened.
        seconds: wall time of the engines that were compared; engines shared with other relations count in each.
        not_applicable: why the relation cannot be tried on this device; empty where it was.
        schedules: paths of the two stored schedules, want then got, where they were stored.
    """

    relation: str
    configuration: str
    rows_compared: int
    differences: int
    first_difference: FirstDifference | None
    mechanisms: Mapping[str, int]
    exercised: bool
    seconds: float
    not_applicable: str = ""
    schedules: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """``equal``, ``different``, ``not exercised`` or ``not applicable``; only the first is a pass."""
        if self.not_applicable:
            return NOT_APPLICABLE
        if self.differences > 0:
            return DIFFERENT
        return EQUAL if self.exercised and self.rows_compared > 0 else NOT_EXERCISED


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResult:
    """One planted fault.

    Attributes:
        name: of the mutant, see ``mutants.MUTANTS``.
        ran: how often the changed code ran; 0 is a failure whatever else happened.
        caught_by: relation, or ``operation <name>``, that differed; None: missed.
        what: one sentence on what was broken.
        rows_compared: rows the catching relation compared.
        differences: rows among them that differed.
    """

    name: str
    ran: int
    caught_by: str | None
    what: str = ""
    rows_compared: int = 0
    differences: int = 0

    @property
    def is_killed(self) -> bool:
        return self.ran > 0 and self.caught_by is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageRow:
    """One threshold of the code that a batch quantity is compared with, and how often each side was reached.

    Attributes:
        name: of the threshold, see ``thresholds.THRESHOLDS``.
        where: file and function.
        value: the threshold in words, with the quantity and its unit.
        below: how often the quantity stayed below it.
        above: how often it reached it.
        unreachable: why one side cannot be reached with this checkpoint; empty where both must be.
    """

    name: str
    where: str
    value: str
    below: int
    above: int
    unreachable: str = ""

    @property
    def is_covered(self) -> bool:
        return bool(self.unreachable) or (self.below > 0 and self.above > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """One public operation of ``deepinfer_kernels`` under the row property; ``batches`` compared with rows alone."""

    operation: str
    rows_compared: int
    batches: int
    differences: int
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Everything one run of the harness found.

    Attributes:
        depth: ``quick`` or ``full``.
        device: ``cpu`` or the name of the accelerator.
        checkpoint: ``nano``, ``tiny`` or a path.
        workload_seed: of the random part of the workload.
        is_complete: False where the run was interrupted; what it holds is still true.
        failures: one line per failed test that belongs to none of the lists.
    """

    depth: str
    device: str
    checkpoint: str
    workload_seed: int
    seconds: float = 0.0
    is_complete: bool = True
    relations: tuple[RelationResult, ...] = ()
    operations: tuple[OperationResult, ...] = ()
    mutants: tuple[MutantResult, ...] = ()
    coverage: tuple[CoverageRow, ...] = ()
    failures: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows_compared(self) -> int:
        return sum(result.rows_compared for result in self.relations)

    @property
    def is_passed(self) -> bool:
        """Every relation equal or not applicable, every mutant killed, every threshold covered."""
        return (
            self.is_complete
            and not self.failures
            and all(result.outcome in (EQUAL, NOT_APPLICABLE) for result in self.relations)
            and all(result.differences == 0 for result in self.operations)
            and all(result.is_killed for result in self.mutants)
            and all(row.is_covered for row in self.coverage)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``json.dumps``."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunResult:
        """The record that ``to_json`` wrote.

        Raises:
            InputError: another format, or a field is missing or unknown.
        """
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, Mapping) else type(value).__name__
            raise InputError(f"run result: format is {found!r}, expected {FORMAT}; run the harness again")
        fields = {name: content for name, content in value.items() if name != "format"}
        try:
            return cls(
                **{
                    **fields,
                    "relations": tuple(_relation(item) for item in fields["relations"]),
                    "operations": tuple(OperationResult(**item) for item in fields["operations"]),
                    "mutants": tuple(MutantResult(**item) for item in fields["mutants"]),
                    "coverage": tuple(CoverageRow(**item) for item in fields["coverage"]),
                    "failures": tuple(fields["failures"]),
                }
            )
        except (TypeError, KeyError, ValueError) as error:
            raise InputError(f"run result: a field is wrong ({error}), expected what to_json writes") from None


def _relation(value: Mapping[str, Any]) -> RelationResult:
    first = value["first_difference"]
    return RelationResult(
        **{
            **value,
            "first_difference": None if first is None else FirstDifference(**first),
            "schedules": tuple(value["schedules"]),
        }
    )


def write_result(result: RunResult, path: Path) -> None:
    """Write the result whole or not at all: an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result.to_json(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def read_result(path: Path) -> RunResult:
    """Read what ``write_result`` wrote.

    Raises:
        InputError: the file is missing, is no JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"run result: {path} cannot be read ({error}), expected the file of a run") from None
    return RunResult.from_json(value)
