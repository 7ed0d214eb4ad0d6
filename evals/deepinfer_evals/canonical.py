"""One text, and one hash, for each value: JSON with sorted keys and no blanks, UTF-8, SHA-256."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The text that is hashed.

    Raises:
        TypeError, ValueError: the value is not plain JSON (NaN is not).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_of(value: Any) -> str:
    """SHA-256 of the canonical JSON, hex."""
    return text_hash(canonical_json(value))


def text_hash(text: str) -> str:
    """SHA-256 of the UTF-8 bytes, hex; lone surrogates, which JSON can carry, are encoded too."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
