"""A file of JSON lines that survives a kill at any moment: a line counts once it is whole on the disk."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_plugin.errors import InputError


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; none where the file is absent. A line that a kill cut short is left out.

    Raises:
        InputError: a line before the last cannot be read, which no kill can cause.
    """
    if not path.exists():
        return []
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
        try:
            value = json.loads(line)
        except ValueError:
            raise InputError(f"{path}:{number}: no whole JSON, expected a record; the file was changed") from None
        records.append(value)
    return records


class Journal:
    """Appends records; one process at a time. Used as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def __enter__(self) -> Journal:
        """Lock the file and cut off what a kill left unfinished.

        Raises:
            InputError: another process writes it, or it cannot be written.
        """
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InputError(f"run folder: {self.path} cannot be written ({error}); choose another --out") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise InputError(f"run folder: {self.path} is being written by another process; wait for it") from None
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; when this returns, it is on the disk.

        Raises:
            InputError: the disk refused; the journal holds what it held before.
        """
        line = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        size, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise InputError(f"run folder: {self.path} cannot be written ({error}); make room and run again") from None
