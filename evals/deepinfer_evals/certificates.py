"""Certificates of ``deepinfer_determinism``, as far as a client needs them: the hash, and the environment shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals.canonical import hash_of
from deepinfer_plugin.errors import InputError

KIND = "deepinfer determinism certificate"
COMPARED = ("versions", "machine", "settings", "patches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One certificate whose hash holds."""

    content_hash: str
    is_passed: bool
    environment: Mapping[str, Any]

    def differences(self, provenance: Mapping[str, Any]) -> Iterator[str]:
        """Where the certified environment is not that of a server, one line each."""
        for part in COMPARED:
            yield from _differences(self.environment.get(part), provenance.get(part), part)


def read_certificate(path: Path) -> Certificate:
    """Read a certificate and check its hash.

    Raises:
        InputError: it cannot be read, is something else, or was changed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"certificate: {path} cannot be read ({error}), expected a whole JSON file") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise InputError(f"certificate: {path} is something else, expected kind {KIND!r}; name a certificate")
    found = hash_of({name: part for name, part in value.items() if name != "content_hash"})
    if found != value.get("content_hash"):
        raise InputError(f"certificate: {path} was changed after it was made, expected its content hash; make it again")
    return Certificate(
        content_hash=found, is_passed=bool(value["summary"]["is_passed"]), environment=value["environment"]
    )


def _differences(there: Any, here: Any, path: str) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(there.keys() | here.keys()):
            yield from _differences(there.get(name, "absent"), here.get(name, "absent"), f"{path}.{name}")
    elif there != here:
        yield f"{path}: certified {there!r}, server {here!r}"
