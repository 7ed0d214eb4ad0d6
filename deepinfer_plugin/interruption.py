"""Ctrl-C and SIGTERM of a program of ours, remembered.

A terminal's Ctrl-C reaches the ranks of an engine as well, and vLLM may make an error of what follows.
"""

from __future__ import annotations

import signal
from typing import NoReturn

_came = False


def listen() -> None:
    """Take both signals as an interruption: children are stopped, results are kept."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def interrupt(number: int, frame: object) -> NoReturn:
    """Handler of the signals."""
    global _came
    del number, frame
    _came = True
    raise KeyboardInterrupt


def has_come() -> bool:
    """Whether this process was interrupted; an error behind that says nothing of the engine."""
    return _came
