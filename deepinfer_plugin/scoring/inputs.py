"""The input of ``score``: one JSON object per line, {"id": str, "tokens": [int, ...], "decode_from": int}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from deepinfer_plugin.errors import InputError

FIELDS = ("id", "tokens", "decode_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sequence. Tokens before ``decode_from`` are the prompt; the others are fed one at a time."""

    name: str
    tokens: tuple[int, ...]
    decode_from: int

    @property
    def prompt(self) -> list[int]:
        """Tokens given at once."""
        return list(self.tokens[: self.decode_from])

    @property
    def continuation(self) -> list[int]:
        """Tokens forced one at a time."""
        return list(self.tokens[self.decode_from :])


def read_records(path: Path, vocab_size: int, decode_from: int | None) -> list[Record]:
    """Read and check every line before anything is computed.

    Args:
        path: the JSONL file; empty lines are skipped.
        vocab_size: token ids must be below it.
        decode_from: for lines that do not set their own; None makes the whole sequence a prompt.

    Raises:
        InputError: the file cannot be read, or a line breaks a rule; the text starts with file:line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the input cannot be read ({error}); expected a UTF-8 file of JSON lines") from None
    records: list[Record] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line, vocab_size, decode_from)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        if record.name in seen:
            raise InputError(
                f"{path}:{number}: id {record.name!r} is also on line {seen[record.name]}, expected unique ids"
            )
        seen[record.name] = number
        records.append(record)
    if not records:
        raise InputError(f"{path}: the input holds no record, expected one JSON object per line")
    return records


def _parse(line: str, vocab_size: int, decode_from: int | None) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"the line is a JSON {type(value).__name__}, expected an object with id and tokens")
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise ValueError(f"field {unknown[0]!r} is unknown, expected {', '.join(FIELDS)}")
    name, tokens = value.get("id"), value.get("tokens")
    if not isinstance(name, str) or not name or name.startswith("__"):
        raise ValueError(f"id is {name!r}, expected a non-empty string that does not start with __")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("tokens is missing or empty, expected a list of token ids")
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"tokens[{position}] is {token!r}, expected an id from 0 to {vocab_size - 1}")
    start = value.get("decode_from", len(tokens) if decode_from is None else decode_from)
    if type(start) is not int or not 1 <= start <= len(tokens):
        raise ValueError(f"decode_from is {start!r}, expected 1 to {len(tokens)}, the number of tokens")
    return Record(name=name, tokens=tuple(tokens), decode_from=start)
