"""The set of kernels: what is refused, and what status and answers call it."""

import importlib.util

import pytest

from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.platforms.capabilities import check_kernel_set, kernel_set_of
from deepinfer_plugin.platforms.detect import Decision
from deepinfer_plugin.settings import Accelerator, Settings

NAME = "DEEPINFER_KERNEL_SET"
GPU = Decision(accelerator=Accelerator.NVIDIA, platform=None, why="1 NVIDIA GPU")
CPU = Decision(accelerator=Accelerator.CPU, platform=None, why="no accelerator was found")


def test_tilelang_needs_a_gpu() -> None:
    settings = Settings.from_envs({NAME: "tilelang"})
    check_kernel_set(settings, GPU)
    with pytest.raises(SettingError, match=r"DEEPINFER_KERNEL_SET is 'tilelang'.*no accelerator was found; unset it"):
        check_kernel_set(settings, CPU)
    check_kernel_set(Settings.from_envs({NAME: "triton"}), CPU)
    check_kernel_set(Settings.from_envs({}), CPU)


def test_tilelang_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="expected TileLang to be installed"):
        check_kernel_set(Settings.from_envs({NAME: "tilelang"}), GPU)


@pytest.mark.parametrize("chosen", ["triton", "tilelang"])
def test_status_names_the_chosen_set(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, chosen)
    assert kernel_set_of("cuda") == chosen
    assert kernel_set_of("cpu") == "reference"
