"""Fixtures of the evaluations: made-up rows, a server that computes its answers, and the command line in-process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer_evals import mini
from deepinfer_evals.__main__ import main
from deepinfer_evals.fake_server import FakeServer

Command = Callable[..., int]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake server that answers at once."""
    with FakeServer() as running:
        yield running


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve AIME-like rows as a local data set."""
    return mini.write_rows(tmp_path / "rows", mini.aime_rows(12))


@pytest.fixture
def command() -> Command:
    """``command("run", "aime2026", ...)``: exit code of the program, run in this process."""

    def run(*words: object) -> int:
        return main([str(word) for word in words])

    return run
