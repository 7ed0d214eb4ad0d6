"""``run`` as a program: being stopped keeps what it has."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from deepinfer_determinism.results import read_result
from deepinfer_determinism.run_command import TESTS

DOTS = 3  # tests that have passed when the signal is sent; the second is the first operation


def test_a_run_that_is_stopped_keeps_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    command = [sys.executable, "-m", "deepinfer_determinism", "run", "--relation", "order", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = threading.Timer(240.0, process.kill)
    watch.start()
    said = b""
    assert process.stdout is not None
    while byte := process.stdout.read(1):
        said += byte
        if byte == b"." and said.count(b".") == DOTS:
            process.send_signal(signal.SIGTERM)  # handled as Ctrl-C is
    watch.cancel()
    assert process.wait() == 130, said.decode()
    assert f"are kept in {out}" in said.decode()
    result = read_result(out)
    assert not result.is_complete
    assert len(result.operations) >= DOTS - 1


DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda number, frame: print("first", flush=True))
code = "import time; print('begun', flush=True); time.sleep(20); print('late')"
subprocess.run([sys.executable, "-c", code])
"""


def test_the_second_interruption_ends_what_does_not_heed_the_first() -> None:
    imports = "import sys\nfrom deepinfer_determinism.run_command import run_apart"
    call = f"{imports}\nrun_apart([sys.executable, '-c', {DEAF!r}])"
    with subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"first\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"", "the pipe ends with the last process that holds it"
        assert process.stderr is not None
        assert b"KeyboardInterrupt" in process.stderr.read()


def test_every_test_whose_result_a_certificate_holds_is_run() -> None:
    """Those that take the session's harness, which collects results."""
    takes_harness = re.compile(r"def test_\w+\([^)]*\bharness: Harness\b")
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    assert sorted(TESTS) == [path.name for path in files if takes_harness.search(path.read_text(encoding="utf-8"))]
