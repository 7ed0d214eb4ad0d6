"""The two curves of an engine: prefill speed against the time of a step, decode speed against the speed of one user.

Measured tokens come first. Beside them stands what the same steps would give with drafts, under a stated assumption.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_plugin.bench.cases import Case, prefill
from deepinfer_plugin.errors import SettingError

PREFILL, DECODE = "prefill", "decode"
Series = tuple[str, list[tuple[float, float]]]  # label and (x, y)
COLUMNS = (
    "kind",
    "batch",
    "context",
    "step_time_ms",
    "tokens_per_s",
    "user_tokens_per_s",
    "converted_tokens_per_s",
    "converted_user_tokens_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Drafts verified in a step, and the share of them that is accepted; steps are taken to last as long as without."""

    drafts: int = 3
    acceptance: float = 0.75

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise SettingError(f"bench: --drafts is {self.drafts}, expected 0 or more")
        if not 0.0 <= self.acceptance <= 1.0:
            raise SettingError(f"bench: --acceptance is {self.acceptance}, expected 0 to 1")

    @property
    def factor(self) -> float:
        """Tokens of a step for one request."""
        return 1.0 + self.drafts * self.acceptance

    def to_json(self) -> dict[str, Any]:
        text = (
            f"converted = measured x {self.factor:g} = 1 + {self.drafts} drafts x {self.acceptance:g} accepted, at "
            "unchanged step time; nothing of it was measured"
        )
        return {"drafts": self.drafts, "acceptance": self.acceptance, "factor": self.factor, "text": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement. ``batch``: tokens of a prefill step, or requests decoded together, per rank."""

    kind: str
    batch: int
    context: int
    step_time_s: float
    tokens_per_s: float

    @classmethod
    def from_rate(cls, case: Case, batch: int, tokens_per_s: float) -> Point:
        """From the rate of ``case``: prompt tokens per second of a prefill, new tokens per second of a decode."""
        if not case.is_prefill:
            step_time_s = case.num_requests / tokens_per_s
            return cls(
                kind=DECODE, batch=batch, context=case.context, step_time_s=step_time_s, tokens_per_s=tokens_per_s
            )
        num_tokens = case.num_requests * case.context
        num_steps = -(-num_tokens // batch)
        step_time_s = num_tokens / tokens_per_s / num_steps
        return cls(kind=PREFILL, batch=batch, context=case.context, step_time_s=step_time_s, tokens_per_s=tokens_per_s)

    def to_row(self, assumption: Assumption) -> dict[str, Any]:
        """Columns in the order of ``COLUMNS``; a prefill has no user's speed and nothing to convert."""
        is_decode = self.kind == DECODE
        user = self.tokens_per_s / self.batch
        return {
            "kind": self.kind,
            "batch": self.batch,
            "context": self.context,
            "step_time_ms": 1000.0 * self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "user_tokens_per_s": user if is_decode else None,
            "converted_tokens_per_s": self.tokens_per_s * assumption.factor if is_decode else None,
            "converted_user_tokens_per_s": user * assumption.factor if is_decode else None,
        }


def prefill_case(batch_tokens: int, context: int) -> Case:
    """Prompts of ``context`` tokens that fill a step of ``batch_tokens``; a longer prompt takes several steps."""
    return prefill(max(1, batch_tokens // context), context)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Positive integers separated by commas, ascending, each once.

    Raises:
        SettingError: the text is not that.
    """
    parts = text.split(",")
    sizes = tuple(int(part) for part in parts if part.isascii() and part.isdigit())
    if len(sizes) != len(parts) or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise SettingError(f"bench: {option} is {text!r}, expected ascending integers above 0 separated by commas")
    return sizes


def to_csv(points: Sequence[Point], assumption: Assumption) -> str:
    """A header and one row per point."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(point.to_row(assumption) for point in points)
    return out.getvalue()


def to_text(points: Sequence[Point], assumption: Assumption) -> str:
    """The table a person reads: measured columns, then the converted ones with their assumption."""
    lines = [f"{'':8} {'batch':>7} {'context':>8} {'step ms':>10} {'tokens/s':>12} {'per user':>10} {'converted':>12}"]
    for point in points:
        row = point.to_row(assumption)
        cells = [row["tokens_per_s"], row["user_tokens_per_s"], row["converted_tokens_per_s"]]
        shown = ["-" if cell is None else f"{cell:,.1f}" for cell in cells]
        lines.append(
            f"{point.kind:8} {point.batch:>7} {point.context:>8} {row['step_time_ms']:>10.2f} "
            f"{shown[0]:>12} {shown[1]:>10} {shown[2]:>12}"
        )
    return "\n".join([*lines, assumption.to_json()["text"]])


def charts(points: Sequence[Point], assumption: Assumption) -> Mapping[str, tuple[str, str, list[Series]]]:
    """For each curve that has points: title of x and y, and its series as (label, [(x, y)])."""
    found: dict[str, tuple[str, str, list[Series]]] = {}
    rows = [point.to_row(assumption) for point in points]
    if prefills := [row for row in rows if row["kind"] == PREFILL]:
        line = [(row["step_time_ms"], row["tokens_per_s"]) for row in prefills]
        found[PREFILL] = ("step time, ms", "prompt tokens/s", [("measured", line)])
    if decodes := [row for row in rows if row["kind"] == DECODE]:
        measured = [(row["user_tokens_per_s"], row["tokens_per_s"]) for row in decodes]
        converted = [(row["converted_user_tokens_per_s"], row["converted_tokens_per_s"]) for row in decodes]
        label = f"converted x {assumption.factor:g}, not measured"
        found[DECODE] = ("tokens/s of one user", "tokens/s", [("measured", measured), (label, converted)])
    return found
