"""The input of a program, one record a line. Every line is checked before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from deepinfer_plugin.errors import InputError


class Named(Protocol):
    """A record of an input."""

    @property
    def name(self) -> str:
        """Its id, unique in the input."""


def read_lines[T: Named](path: Path, parse: Callable[[str, int], T], kind: str) -> list[T]:
    """Read and check every line that is not empty.

    Args:
        path: UTF-8 text.
        parse: makes a record of a line and its number, from 1; a ValueError says which rule the line breaks.
        kind: what a record is called, for the error about an input without any.

    Raises:
        InputError: the file cannot be read, or a line breaks a rule; the text starts with file:line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the input cannot be read ({error}); expected UTF-8 text") from None
    records: list[T] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would cut at U+2028, inside a text
        if not line.strip():
            continue
        try:
            record = parse(line, number)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        if record.name in seen:
            raise InputError(
                f"{path}:{number}: id {record.name!r} is also on line {seen[record.name]}, expected unique ids"
            )
        seen[record.name] = number
        records.append(record)
    if not records:
        raise InputError(f"{path}: the input holds no {kind}, expected one a line")
    return records


def json_object(line: str, fields: Sequence[str], holding: str) -> dict[str, Any]:
    """The JSON object of a line, its fields known.

    Args:
        line: the text.
        fields: that an object may have.
        holding: those that it must have, in words.

    Raises:
        ValueError: it is something else.
    """
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the line is not JSON ({error})") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "the line holds half of a surrogate pair (\\ud800 to \\udfff), expected whole characters"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"the line is a JSON {type(value).__name__}, expected an object with {holding}")
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ValueError(f"field {unknown[0]!r} is unknown, expected {', '.join(fields)}")
    return value
