"""A real ``vllm serve`` as a child process: started, watched until it is healthy, and stopped with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from deepinfer_plugin import envs
from deepinfer_plugin.cli.console import WaitLine
from deepinfer_plugin.errors import EngineError

HOST = "127.0.0.1"
POLL_S = 0.25
STOP_S = 30.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TAIL_LINES = 12
ERROR_LINE = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .*)$")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Let Linux ask this process to end when the one that started it is killed and cannot stop it any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def vllm_command() -> list[str]:
    """The ``vllm`` program of this Python."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.exists():
        return [str(beside)]
    found = shutil.which("vllm")
    if found is None:
        raise EngineError("server: the command vllm was not found beside this Python; run ./build.sh")
    return [found]


class Server:
    """One server, used as a context: leaving it stops every process that it started."""

    def __init__(self, model: Path, log: Path, port: int, flags: Sequence[str]) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self.log = log
        self.command = [*vllm_command(), "serve", str(model), f"--host={HOST}", f"--port={port}", *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    def __enter__(self) -> Server:
        self._started_s = time.monotonic()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=envs.child_environment(),
                start_new_session=True,  # its own process group, so that all of it can be stopped
                preexec_fn=_end_with_parent,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        assert self._process is not None
        return self._process.pid

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Wait with a visible line; returns the seconds since the start.

        Raises:
            EngineError: the server ended, or was not healthy in time; the text carries the end of its log.
        """
        line = WaitLine()
        try:
            while True:
                elapsed_s = time.monotonic() - self._started_s
                if self._is_healthy():
                    return elapsed_s
                self.check_alive()
                if elapsed_s > timeout_s:
                    raise EngineError(self._with_tail(f"server: not healthy after {timeout_s:.0f} s"))
                line.update(elapsed_s, f"  waiting for health, {elapsed_s:3.0f} s  {self._last_line()}")
                time.sleep(POLL_S)
        finally:
            line.done()

    def check_alive(self) -> None:
        """Raise an EngineError with the end of the log if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise EngineError(self._with_tail(f"server: vllm serve ended with exit code {code}"))

    def wait(self) -> None:
        """Wait until the server ends by itself."""
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """Ask the server to end, then end what is left of its process group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def resident_bytes(self) -> tuple[int, int]:
        """Sum of the resident memory of the server's processes, and their number."""
        import psutil

        root = psutil.Process(self.pid)
        sizes: list[int] = []
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                sizes.append(int(process.memory_info().rss))
        return sum(sizes), len(sizes)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _last_line(self) -> str:
        lines = self._log_text().splitlines()
        text = lines[-1] if lines else ""
        return text.partition("] ")[2][:70] or text[:70]

    def _log_text(self) -> str:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _with_tail(self, text: str) -> str:
        """``text``, the first error of the log (later ones are its echoes) and the log's end."""
        lines = self._log_text().splitlines()
        first = next((found.group(1) for line in lines if (found := ERROR_LINE.search(line))), None)
        head = text if first is None else f"{text}: {first}"
        return "\n".join([f"{head}; the end of its log {self.log}:", *(f"    {line}" for line in lines[-TAIL_LINES:])])
