"""How engines of child processes share GPUs."""

from __future__ import annotations

import pytest

from deepinfer_plugin.engine_child import gpus
from deepinfer_plugin.engine_child.gpus import lack_for, lack_of_gpus, rotated, serving_gpus, worker_start
from deepinfer_plugin.platforms import detect
from deepinfer_plugin.platforms.detect import Decision
from deepinfer_plugin.settings import Accelerator


def serve_on(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator, *visible: str) -> None:
    decision = Decision(accelerator=accelerator, platform=None, why="test")
    monkeypatch.setattr(gpus, "current_decision", lambda: decision)
    for module in (gpus, detect):
        monkeypatch.setattr(module, "visible_gpus", lambda: visible)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (("0", "1"), ["0,1", "1,0", "0,1", "1,0"]),
        (("3", "1", "2"), ["3,1,2", "1,2,3", "2,3,1", "3,1,2"]),
        (("GPU-5a", "GPU-77"), ["GPU-5a,GPU-77", "GPU-77,GPU-5a", "GPU-5a,GPU-77", "GPU-77,GPU-5a"]),
    ],
)
def test_children_begin_at_one_gpu_after_another_and_see_all(visible: tuple[str, ...], expected: list[str]) -> None:
    assert [rotated(visible, number) for number in range(4)] == [{"CUDA_VISIBLE_DEVICES": text} for text in expected]


@pytest.mark.parametrize("visible", [(), ("0",), ("GPU-5a",)])
def test_without_a_choice_the_list_of_the_user_stays(visible: tuple[str, ...]) -> None:
    assert rotated(visible, 1) == {}


def test_workers_are_spawned_where_their_parent_may_have_used_cuda() -> None:
    assert (worker_start("cpu"), worker_start("cuda")) == ("fork", "spawn")


def test_ranks_on_the_cpu_lack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_on(monkeypatch, Accelerator.CPU, "0")
    assert serving_gpus() == ()
    assert lack_for(8) == ""


def test_ranks_on_gpus_need_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_on(monkeypatch, Accelerator.NVIDIA, "0", "1")
    assert serving_gpus() == ("0", "1")
    assert [lack_for(number) for number in (1, 2)] == ["", ""]
    hint = "DEEPINFER_RANKS_PER_GPU lets several take turns on one"
    assert lack_for(4) == f"4 ranks need 4 GPUs, this process has places for 2; {hint}"
    assert lack_of_gpus(2, 1) == f"2 ranks need 2 GPUs, this process has places for 1; {hint}"


def test_ranks_that_share_a_gpu_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_on(monkeypatch, Accelerator.NVIDIA, "0")
    monkeypatch.setenv("DEEPINFER_RANKS_PER_GPU", "4")
    assert serving_gpus() == ("0",)
    assert [lack_for(4), lack_for(8).split(";")[0]] == ["", "8 ranks need 8 GPUs, this process has places for 4"]
