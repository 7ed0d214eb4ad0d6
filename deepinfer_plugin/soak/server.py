"""The server of a soak: the small checkpoint on this machine's CPU, on the loopback interface only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from deepinfer_plugin.cli.server import Server, free_port

MODEL = "m"
FLAGS = (
    f"--served-model-name={MODEL}",
    "--max-model-len=512",
    "--max-num-seqs=48",
    "--max-num-batched-tokens=256",
    "--kv-cache-memory-bytes=67108864",
    "--enable-auto-tool-choice",
    "--tool-call-parser=deepseek_v41",
    "--reasoning-parser=deepseek_v41",
)
START_S = 600.0
_CHILD = "deepinfer_plugin.grammar.compile_child"


@contextlib.contextmanager
def soak_server(checkpoint: Path, log: Path) -> Iterator[Server]:
    """A healthy server, stopped at the end.

    Raises:
        EngineError: it does not start; the text carries the end of its log.
    """
    with Server(checkpoint, log, free_port(), FLAGS) as server:
        server.wait_until_healthy(START_S)
        yield server


def resident_mib(server: Server) -> float:
    """Memory of the server's processes in MiB, without the compiler of constraints, which is replaced at times."""
    total = 0
    root = psutil.Process(server.pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            if _CHILD not in process.cmdline():
                total += int(process.memory_info().rss)
    return total / 2**20
