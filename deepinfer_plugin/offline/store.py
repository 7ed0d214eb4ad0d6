"""Answers of ``offline``: one JSON line per record, joined into one JSONL file at the end (``resumable``).

The manifest of a finished output stands beside it, in ``OUT.manifest.json``: a JSONL file has no place for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_plugin.resumable import PartialResults, read_json, write_whole


class AnswerStore(PartialResults):
    """One line per record."""

    program = "offline"
    suffix = ".jsonl"

    def put(self, name: str, answer: Mapping[str, Any]) -> None:
        """Store one answer, an object with ``id`` equal to ``name``."""
        self.put_bytes(name, json.dumps(answer, ensure_ascii=False).encode() + b"\n")

    def merge(self, names: Sequence[str]) -> None:
        """Join the lines in the order of ``names``; the manifest is there before the output is."""
        write_whole(self._manifest_path, json.dumps(self._manifest, indent=1).encode())
        super().merge(names)

    @property
    def _manifest_path(self) -> Path:
        return self.out.with_name(self.out.name + ".manifest.json")

    def _blocks(self, names: Sequence[str]) -> Iterator[bytes]:
        return (self._part(name).read_bytes() for name in names)

    def _name_in(self, path: Path) -> str:
        return str(json.loads(path.read_bytes())["id"])

    def _output_manifest(self) -> dict[str, Any] | None:
        return read_json(self._manifest_path)
