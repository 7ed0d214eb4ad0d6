"""The input of ``score``: one JSON object per line, {"id": str, "tokens": [int, ...], "decode_from": int}."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer_plugin.line_input import json_object, read_lines

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
    return read_lines(path, lambda line, _: _parse(line, vocab_size, decode_from), "record")


def _parse(line: str, vocab_size: int, decode_from: int | None) -> Record:
    value = json_object(line, FIELDS, "id and tokens")
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
