"""The child server with stand-ins for ``vllm``: health, death with its reason, and nothing left running afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_plugin.cli import server as module
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.errors import EngineError

# Answers /health after a while, and has a child of its own, as vLLM has.
HEALTHY = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2] + "/child", "w").write(str(child.pid))
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--port="))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DYING = """
import sys
print("(EngineCore pid=1) ERROR 01-01 [core.py:1] ValueError: the first reason")
print("RuntimeError: an echo of it")
sys.exit(3)
"""
STUCK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Server:
    monkeypatch.setattr(module, "vllm_command", lambda: [sys.executable, "-c", code])
    return Server(tmp_path, tmp_path / "log", free_port(), ())


def is_running(pid: int) -> bool:
    """Whether the process lives; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_healthy_server_is_waited_for_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(tmp_path, monkeypatch, HEALTHY) as server:
        assert 0.3 < server.wait_until_healthy(30) < 30
        size, count = server.resident_bytes()
        assert (size > 2**20, count) == (True, 2)
        pids = [server.pid, int((tmp_path / "child").read_text())]
        assert all(map(is_running, pids))
    assert all(map(ends, pids))
    assert "waiting for health" in capsys.readouterr().out


PARENT = """
import sys, time
from pathlib import Path
from deepinfer_plugin.cli import server
server.vllm_command = lambda: [sys.executable, "-c", "import time; time.sleep(600)"]
with server.Server(Path("."), Path(sys.argv[1]) / "log", 1, ()) as running:
    (Path(sys.argv[1]) / "pid").write_text(str(running.pid))
    time.sleep(600)
"""


def test_a_server_ends_when_its_program_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)]) as parent:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
        parent.kill()
    assert ends(pid)


def test_a_server_that_dies_is_reported_with_its_first_error_and_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, monkeypatch, DYING) as server, pytest.raises(EngineError) as caught:
        server.wait_until_healthy(30)
    head, *tail = str(caught.value).splitlines()
    assert head.startswith("server: vllm serve ended with exit code 3: ValueError: the first reason; ")
    assert tail[-1].strip() == "RuntimeError: an echo of it"


def test_a_server_that_never_gets_healthy_is_given_up_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.5)
    with make(tmp_path, monkeypatch, STUCK) as server:
        pid = server.pid
        with pytest.raises(EngineError, match="not healthy after 1 s"):
            server.wait_until_healthy(1)
    assert ends(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_stops_its_server(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import sys
from pathlib import Path
from deepinfer_plugin import __main__ as program, interruption
from deepinfer_plugin.cli import demo, server
interruption.listen()
server.vllm_command = lambda: [sys.executable, "-c", {HEALTHY!r}]
demo._write_checkpoint = lambda folder, config: Path({str(tmp_path)!r})
demo._ask = lambda server: print("asking", flush=True) or True
sys.exit(program.main(["demo", "--keep", "--dir", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "vllm bench serve" in line:
            break
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert "server stopped" in rest
    assert ends(child)
