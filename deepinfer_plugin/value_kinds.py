"""How the text of a DEEPINFER_* variable is read: one kind per way of writing a value. Loads neither torch nor vLLM.

Each kind carries its rule in words; ``parse`` raises ``ValueError`` for every text outside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FALSE = ("0", "", "false", "False")
LOOKS_FALSE = re.compile(r"no?|off|f|false|disabled?|none", re.IGNORECASE)  # and is true by the rule of booleans

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]{1,3})?")
_ID_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind[T]:
    """One way of writing a value: ``words`` are the texts shown in tables, where they are few."""

    rule: str
    parse: Callable[[str], T]
    words: tuple[str, ...] = ()


def _parse_flag(text: str) -> bool:
    return text not in FALSE


# DeepInfer's own rule: whatever is not one of the four words for false is true.
FLAG: Kind[bool] = Kind(rule="0, false, False or empty: off; anything else: on", parse=_parse_flag, words=("0", "1"))


def integer(low: int, high: int | None = None) -> Kind[int]:
    """A decimal integer from ``low`` to ``high``, both allowed; None: no upper bound."""

    def parse(text: str) -> int:
        if _INTEGER.fullmatch(text) is None or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(text)
        return int(text)

    bounds = f"{low} or more" if high is None else f"{low} to {high}"
    return Kind(rule=f"an integer, {bounds}", parse=parse)


def word(*words: str) -> Kind[str]:
    """One of ``words``, spelled exactly so."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return Kind(rule=f"{', '.join(words[:-1])} or {words[-1]}", parse=parse, words=words)


def _parse_path(text: str) -> Path | None:
    if "\0" in text:
        raise ValueError(text)
    return Path(text) if text else None


PATH: Kind[Path | None] = Kind(rule="a path; empty: none", parse=_parse_path)


def positive_numbers(smallest: float) -> Kind[tuple[float, ...]]:
    """Positive numbers separated by commas; each is lifted to ``smallest``."""

    def parse(text: str) -> tuple[float, ...]:
        parts = text.split(",")
        if any(_NUMBER.fullmatch(part) is None for part in parts):
            raise ValueError(text)
        values = [float(part) for part in parts]
        if any(value <= 0.0 or not math.isfinite(value) for value in values):
            raise ValueError(text)
        return tuple(max(value, smallest) for value in values)

    return Kind(rule="positive numbers separated by commas", parse=parse)


def _parse_id_ranges(text: str) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for part in text.split(",") if text else ():
        found = _ID_RANGE.fullmatch(part)
        if found is None:
            raise ValueError(text)
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise ValueError(text)
        ranges.append((low, high))
    return tuple(ranges)


# Pairs (first, last), both included.
ID_RANGES: Kind[tuple[tuple[int, int], ...]] = Kind(
    rule="token ids and ranges first-last separated by commas; empty: none", parse=_parse_id_ranges
)
