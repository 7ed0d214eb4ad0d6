"""What children of the harness are started with, without starting any."""

from __future__ import annotations

import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from deepinfer_determinism import engine
from deepinfer_determinism.engine import Children

START, VISIBLE = "VLLM_WORKER_MULTIPROC_METHOD", "CUDA_VISIBLE_DEVICES"


def started(monkeypatch: pytest.MonkeyPatch, device: str, count: int, gpus: tuple[str, ...]) -> list[dict[str, str]]:
    """Environments of the children of a session on a machine with these GPUs."""
    found: list[dict[str, str]] = []

    def start(command: list[str], **options: Any) -> Mock:
        found.append(options["env"])
        return Mock(poll=Mock(return_value=0))

    monkeypatch.setenv(VISIBLE, "as it was")
    monkeypatch.setattr(engine, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(subprocess, "Popen", start)
    with Children(device, count) as children:
        children.start([])
    return found


def test_children_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = started(monkeypatch, "cuda", 3, ("4", "GPU-7"))
    assert [child[VISIBLE] for child in found] == ["4,GPU-7", "GPU-7,4", "4,GPU-7"]
    assert {child[START] for child in found} == {"spawn"}


@pytest.mark.parametrize(("device", "gpus", "start"), [("cuda", ("4",), "spawn"), ("cpu", ("4", "5"), "fork")])
def test_one_gpu_and_the_cpu_leave_the_list_of_the_user(
    device: str, gpus: tuple[str, ...], start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(monkeypatch, device, 2, gpus)
    assert [(child[VISIBLE], child[START]) for child in found] == [("as it was", start)] * 2
