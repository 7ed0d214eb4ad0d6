"""Ctrl-C ends a session wherever it arrives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_determinism.run_command import INTERRUPTED

SWALLOWED = """
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        ran("caught")
"""
REPLACED = """
    try:
        signal.raise_signal(signal.SIGINT)
    finally:  # hypothesis has such assertions
        ran("caught")
        assert False
"""


@pytest.mark.parametrize("body", [SWALLOWED, REPLACED], ids=["swallowed", "replaced"])
def test_an_interruption_that_is_lost_on_its_way_ends_the_session(body: str, tmp_path: Path) -> None:
    """pytest alone goes on with the next test."""
    test = tmp_path / "test_two.py"
    start = f"import pathlib, signal\n\ndef ran(name):\n    pathlib.Path({str(tmp_path)!r}, name).touch()\n"
    test.write_text(f"{start}\ndef test_first():{body}\ndef test_second():\n    ran('second')\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "deepinfer_determinism.options", f"--rootdir={tmp_path}"]
    ended = subprocess.run([*command, str(test)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (tmp_path / "caught").exists(), ended.stdout
    assert not (tmp_path / "second").exists()
    assert ended.returncode == INTERRUPTED, ended.stdout
