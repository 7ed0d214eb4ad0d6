"""An error behind Ctrl-C is the interruption, not a fault of the engine."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from deepinfer_plugin import interruption
from deepinfer_plugin.engine_errors import vllm_may_fail
from deepinfer_plugin.errors import EngineError

interruption.listen()
try:
    with vllm_may_fail("offline", "stopped"):
        try:
            if int(sys.argv[1]):
                os.kill(os.getpid(), int(sys.argv[1]))
        except KeyboardInterrupt:
            pass  # as where it meets code of vLLM that ends something
        raise RuntimeError("cancelled")
except KeyboardInterrupt:
    print("interrupted")
except EngineError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "offline: vLLM stopped (RuntimeError: cancelled); its log above says more"),
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "interrupted"),
    ],
)
def test_an_error_behind_an_interruption_is_the_interruption(number: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number))], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == expected
