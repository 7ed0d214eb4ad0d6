"""Results of ``score``: one safetensors file per record, joined into one at the end (``resumable``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_plugin.resumable import PartialResults

METADATA_KEY = "deepinfer_score"
_COPY_BYTES = 1 << 22
_DTYPES = {"float32": "F32", "int64": "I64", "int32": "I32"}


class ResultStore(PartialResults):
    """Arrays per record; the manifest stands in the metadata of the output."""

    program = "score"
    suffix = ".safetensors"

    def put(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Store the results of one record; ``arrays`` are named without the record's name."""
        named = {f"{name}.{key}": np.ascontiguousarray(value) for key, value in arrays.items()}
        entries: dict[str, object] = {"__metadata__": {"name": name}}
        offset = 0
        for key, value in named.items():
            end = offset + value.nbytes
            entries[key] = {
                "dtype": _DTYPES[value.dtype.name],
                "shape": list(value.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        self.put_bytes(name, _header_bytes(entries) + b"".join(value.tobytes() for value in named.values()))

    def _blocks(self, names: Sequence[str]) -> Iterator[bytes]:
        entries: dict[str, object] = {"__metadata__": {METADATA_KEY: json.dumps(self._manifest)}}
        offset = 0
        for name in names:
            for key, entry in _read_header(self._part(name)).items():
                if key == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                entries[key] = {**entry, "data_offsets": [offset + begin, offset + end]}
            offset += self._part(name).stat().st_size - _data_start(self._part(name))
        yield _header_bytes(entries)
        for name in names:
            yield from _data_blocks(self._part(name))

    def _name_in(self, path: Path) -> str:
        return str(_read_header(path)["__metadata__"]["name"])

    def _output_manifest(self) -> dict[str, Any] | None:
        try:
            value = json.loads(_read_header(self.out)["__metadata__"][METADATA_KEY])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return value if isinstance(value, dict) else None


def _header_bytes(entries: Mapping[str, object]) -> bytes:
    """Length and JSON header of a safetensors file, padded so that the data is aligned to 8 bytes."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _data_start(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _data_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(_data_start(path))
        while block := file.read(_COPY_BYTES):
            yield block
