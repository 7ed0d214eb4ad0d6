"""Results on disk: one file per finished record in a sidecar folder, joined into one safetensors file at the end.

Every file appears under its name in one step, so that a kill at any moment leaves whole files only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from deepinfer_plugin.errors import InputError

MANIFEST = "manifest.json"
METADATA_KEY = "deepinfer_score"
_COPY_BYTES = 1 << 22
_DTYPES = {"float32": "F32", "int64": "I64", "int32": "I32"}


class ResultStore:
    """The sidecar folder of one output file.

    ``manifest`` is everything the results depend on; a sidecar or an output of another manifest is never continued.
    """

    def __init__(self, out: Path, manifest: Mapping[str, object]) -> None:
        self._out = out
        self._folder = out.with_name(out.name + ".partial")
        self._manifest: dict[str, Any] = json.loads(json.dumps(manifest))
        self._lock: IO[str] | None = None

    def open(self) -> bool:
        """Create or continue the sidecar; False where the output is already complete.

        Raises:
            InputError: output or sidecar belong to other inputs, or another process is writing them.
        """
        if self._out.exists():
            self._require_equal(_output_manifest(self._out), f"output {self._out}")
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._folder / "lock", "w", encoding="utf-8")  # noqa: SIM115, held until close()
        except OSError as error:
            raise InputError(
                f"score: --out is {self._out}, which cannot be written ({error}); choose another"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"score: {self._folder} is being written by another process; wait for it") from None
        path = self._folder / MANIFEST
        if path.exists():
            self._require_equal(_read_json(path), f"partial results {self._folder}")
        else:
            _write_whole(path, json.dumps(self._manifest, indent=1).encode())
        return True

    def close(self) -> None:
        """Let another process continue the sidecar."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def finished(self) -> set[str]:
        """Names of the records whose results are stored."""
        return {_read_header(path)["__metadata__"]["name"] for path in self._folder.glob("*.safetensors")}

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
        head = _header_bytes(entries)
        _write_whole(self._part(name), head + b"".join(value.tobytes() for value in named.values()))

    def merge(self, names: Sequence[str]) -> None:
        """Join the parts, in the order of ``names``, into the output file, and remove the sidecar."""
        entries: dict[str, object] = {"__metadata__": {METADATA_KEY: json.dumps(self._manifest)}}
        offset = 0
        for name in names:
            for key, entry in _read_header(self._part(name)).items():
                if key == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                entries[key] = {**entry, "data_offsets": [offset + begin, offset + end]}
            offset += self._part(name).stat().st_size - _data_start(self._part(name))
        temporary = self._folder / "merged.tmp"
        with open(temporary, "wb") as out:
            out.write(_header_bytes(entries))
            for name in names:
                for block in _data_blocks(self._part(name)):
                    out.write(block)
        os.replace(temporary, self._out)
        self.close()
        shutil.rmtree(self._folder)

    def _part(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"

    def _require_equal(self, found: Mapping[str, Any] | None, where: str) -> None:
        if found is None:
            raise InputError(f"score: {where} was not written by score; choose another --out or remove it")
        for key in sorted(set(self._manifest) | set(found)):
            if found.get(key) != self._manifest.get(key):
                raise InputError(
                    f"score: {where} has {key} {_short(found.get(key))}, this run has "
                    f"{_short(self._manifest.get(key))}; choose another --out or remove it"
                )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _output_manifest(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(_read_header(path)["__metadata__"][METADATA_KEY])
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
