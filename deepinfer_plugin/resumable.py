"""Results of a long program on disk: a file per finished record in a sidecar folder, joined into the output at the end.

Every file appears under its name in one step, so that a kill at any moment leaves whole files only, and a record is
stored under a name made from its own: stored twice, it is there once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from deepinfer_plugin.errors import InputError

MANIFEST = "manifest.json"
WHOLE_HASH_BYTES = 64 << 20  # larger shards are told apart by size and time of change


class PartialResults(ABC):
    """The sidecar folder of one output file.

    ``manifest`` is everything the results depend on; a sidecar or an output of another manifest is never continued.
    """

    program: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, out: Path, manifest: Mapping[str, object]) -> None:
        self.out = out
        self._folder = out.with_name(out.name + ".partial")
        self._manifest: dict[str, Any] = json.loads(json.dumps(manifest))
        self._lock: IO[str] | None = None

    @abstractmethod
    def _output_manifest(self) -> dict[str, Any] | None:
        """Manifest of the output file, which exists; None where this program did not write it."""

    @abstractmethod
    def _name_in(self, path: Path) -> str:
        """Name of the record that a part holds."""

    @abstractmethod
    def _blocks(self, names: Sequence[str]) -> Iterator[bytes]:
        """The output file in pieces: the parts of ``names``, in that order."""

    def open(self) -> bool:
        """Create or continue the sidecar; False where the output is already complete.

        Raises:
            InputError: output or sidecar belong to other inputs, or another process is writing them.
        """
        if self.out.exists():
            self._require_equal(self._output_manifest(), f"output {self.out}")
            self._remove_leftover()
            return False
        self._take_lock()
        path = self._folder / MANIFEST
        if path.exists():
            self._require_equal(read_json(path), f"partial results {self._folder}")
        else:
            write_whole(path, json.dumps(self._manifest, indent=1).encode())
        return True

    def _remove_leftover(self) -> None:
        """Remove the sidecar of a program that was killed just after its output appeared."""
        if self._folder.exists():
            self._take_lock()
            self.close()
            shutil.rmtree(self._folder)

    def _take_lock(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._folder / "lock", "w", encoding="utf-8")  # noqa: SIM115, held until close()
        except OSError as error:
            raise InputError(
                f"{self.program}: --out is {self.out}, which cannot be written ({error}); choose another"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{self.program}: {self._folder} is being written by another process; wait for it"
            ) from None

    def close(self) -> None:
        """Let another process continue the sidecar."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def finished(self) -> set[str]:
        """Names of the records whose results are stored."""
        return {self._name_in(path) for path in self._folder.glob(f"*{self.suffix}")}

    def put_bytes(self, name: str, data: bytes) -> None:
        """Store the results of one record."""
        write_whole(self._part(name), data)

    def merge(self, names: Sequence[str]) -> None:
        """Join the parts, in the order of ``names``, into the output file, and remove the sidecar."""
        temporary = self._folder / "merged.tmp"
        with open(temporary, "wb") as out:
            for block in self._blocks(names):
                out.write(block)
        os.replace(temporary, self.out)
        self.close()
        shutil.rmtree(self._folder)

    def _part(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{self.suffix}"

    def _require_equal(self, found: Mapping[str, Any] | None, where: str) -> None:
        if found is None:
            raise InputError(
                f"{self.program}: {where} was not written by {self.program}; choose another --out or remove it"
            )
        for key in sorted(set(self._manifest) | set(found)):
            if found.get(key) != self._manifest.get(key):
                raise InputError(
                    f"{self.program}: {where} has {key} {_short(found.get(key))}, this run has "
                    f"{_short(self._manifest.get(key))}; choose another --out or remove it"
                )


def model_files(model: Path) -> dict[str, str]:
    """For a manifest: per file of the checkpoint its hash, or size and time of change where it is large."""
    found: dict[str, str] = {}
    for path in sorted(model.iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        state = path.stat()
        if state.st_size <= WHOLE_HASH_BYTES:
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[path.name] = f"{state.st_size} bytes, changed {state.st_mtime_ns}"
    return found


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears under its name complete, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."
