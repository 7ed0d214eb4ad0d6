"""What a benchmark is: where its rows come from, how a row becomes a question, who grades, what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_evals.canonical import hash_of
from deepinfer_plugin.errors import InputError

PROMPTS = Path(__file__).with_name("prompts")
REFERENCE_NOTE = (
    "Reference figures are sanity references only: the protocol's prompts, sampling details and graders are not public."
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A published figure, in percent."""

    label: str
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question as it is asked and graded.

    Attributes:
        id: unique in the benchmark; seeds and option order hang on it.
        prompt: the one user message, byte for byte.
        gold: the right answer in the grader's form.
        row_hash: SHA-256 of the fields of the row that were used.
        question: the question alone, for a judge.
    """

    id: str
    prompt: str
    gold: str
    row_hash: str
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: as on the command line; part of every seed.
        version: raised when the meaning of a question changes.
        repo, config, split: of the data set on the hub.
        is_gated: its terms must be accepted there first.
        fields: columns that are read; nothing else of a row has influence.
        num_questions: of the whole benchmark as this task asks it.
        grader: ``integer``, ``choice`` or ``judge``.
        read: id, gold answer, question text and what fills the template; None leaves the row out.
        references: published figures.
        note: what a reader of a score must know.
    """

    name: str
    version: int
    repo: str
    config: str | None
    split: str
    is_gated: bool
    fields: tuple[str, ...]
    num_questions: int
    grader: str
    read: Callable[[Row], Parsed | None]
    references: tuple[Reference, ...]
    note: str = ""

    def template(self) -> str:
        """The prompt with ``{question}`` in it, as the file holds it."""
        return (PROMPTS / f"{self.name}.txt").read_text(encoding="utf-8")

    def questions(self, rows: Sequence[Row]) -> list[Question]:
        """The questions of the rows, in their order.

        Raises:
            InputError: a column is missing or empty, or an id comes twice.
        """
        template = self.template()
        found: dict[str, Question] = {}
        for number, row in enumerate(rows, 1):
            missing = [name for name in self.fields if name not in row]
            if missing:
                raise InputError(
                    f"{self.name}: row {number} has no column {missing[0]!r}, expected {', '.join(self.fields)}; "
                    f"name a copy of {self.repo}"
                )
            parsed = self.read(row)
            if parsed is None:
                continue
            if not parsed.id or not parsed.gold or not parsed.question:
                raise InputError(f"{self.name}: row {number} has an empty id, question or answer, expected all three")
            if parsed.id in found:
                raise InputError(
                    f"{self.name}: row {number} has the id {parsed.id!r} of an earlier row, expected its own"
                )
            found[parsed.id] = Question(
                id=parsed.id,
                prompt=filled(template, {"question": parsed.question, **parsed.slots}),
                gold=parsed.gold,
                row_hash=hash_of({name: row[name] for name in self.fields}),
                question=parsed.question,
            )
        return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a task reads out of a row; ``slots`` fill the template beside ``{question}``."""

    id: str
    question: str
    gold: str
    slots: Mapping[str, str] = field(default_factory=dict)


def filled(template: str, slots: Mapping[str, str]) -> str:
    """Fill the slots in one pass, so that braces in a question (LaTeX has many) are text."""
    parts: list[str] = []
    rest = template
    while rest:
        found = [(rest.find("{" + name + "}"), name) for name in slots if "{" + name + "}" in rest]
        if not found:
            parts.append(rest)
            break
        at, name = min(found)
        parts += [rest[:at], slots[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join(parts)
