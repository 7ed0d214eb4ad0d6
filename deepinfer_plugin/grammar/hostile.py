"""Constraints made to hang, crash or flood a compiler, for tests and the soak. Each must end in one clear refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping


def _nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


HOSTILE: Mapping[str, tuple[str, str]] = {
    "nested 65": ("json", _nested(65)),
    "nested 1,000": ("json", _nested(1_000)),
    "nested 20,000": ("json", _nested(20_000)),
    "brackets": ("json", "[" * 500_000),
    "10 MB": ("json", json.dumps({"properties": {f"k{i}": {"description": "x" * 60} for i in range(100_000)}})),
    "enum of 80,000": ("json", json.dumps({"enum": [f"v{i}" for i in range(80_000)]})),
    "no JSON": ("json", '{"type": '),
    "missing reference": ("json", '{"$ref": "#/$defs/nothing"}'),
    "unclosed": ("regex", "((("),
    "10 MB regex": ("regex", "a" * 10_000_000),
    "NUL": ("regex", "a\0b"),
    "lookahead": ("regex", "(?=a)b"),
    "unclosed grammar": ("grammar", 'root ::= ( "a"'),
    "no root": ("grammar", 'other ::= "a"'),
    "unknown rule": ("grammar", "root ::= nothing"),
}
"""Kind as in ``compile_child.KINDS``, and text."""
