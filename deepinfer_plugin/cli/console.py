"""What the commands write for a person: lines on standard output, and a line that is rewritten while one waits."""

from __future__ import annotations

import sys


def say(text: str = "") -> None:
    """One line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_part(text: str) -> None:
    """A part of a line, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class WaitLine:
    """A progress line: rewritten in place on a terminal, a new line at most every ten seconds elsewhere."""

    QUIET_S = 10.0

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last_s = -self.QUIET_S

    def update(self, elapsed_s: float, text: str) -> None:
        """Show ``text``; ``elapsed_s`` is the time since the wait began."""
        if self._is_terminal:
            say_part(f"\r\x1b[K{text}")
        elif elapsed_s - self._last_s >= self.QUIET_S:
            say(text)
            self._last_s = elapsed_s

    def done(self) -> None:
        """Leave the line as it is."""
        if self._is_terminal:
            say()
