"""Errors of vLLM's engine in a program of ours: one line, with the rest in vLLM's own log above it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer_plugin import interruption
from deepinfer_plugin.errors import EngineError


@contextmanager
def vllm_may_fail(program: str, what: str) -> Iterator[None]:
    """Turn any error of vLLM into ours; ``what`` it did, as ``did not start``.

    Raises:
        EngineError: names class and first line of vLLM's error.
        KeyboardInterrupt: the program was interrupted, and the error came behind it.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if interruption.has_come():
            raise KeyboardInterrupt from error
        raise EngineError(f"{program}: vLLM {what} ({one_line(error)}); its log above says more") from error


def one_line(error: Exception) -> str:
    """Class and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
