"""Hashes of what is in place: equal between processes, and different, by name, for what was replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest import mock

import pytest

from deepinfer_kernels import row_tiles
from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.faults import row_tiles_off, window_short_after_the_first_request
from deepinfer_plugin.model.step import Step
from deepinfer_plugin.worker.live_code import _ONE_PLATFORM, PACKAGES, LiveCode, live_code


def changed(before: dict[str, str]) -> set[str]:
    now = live_code()
    assert now.keys() == before.keys()
    return {name for name, digest in now.items() if digest != before[name]}


def _another(self: object) -> None:
    """Takes the place of a method."""


@pytest.fixture(autouse=True)
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that tests before these have imported count in this process and in no other."""
    for name in [name for name in sys.modules if name.startswith(_ONE_PLATFORM)]:
        monkeypatch.delitem(sys.modules, name)


def test_it_covers_every_package_and_is_equal_in_another_process() -> None:
    here = live_code()
    for package in PACKAGES:
        assert sum(name.startswith(package) for name in here) > 5, package
    code = (
        "import json; from deepinfer_plugin.platforms.detect import platform_class; platform_class();"
        "from deepinfer_plugin.worker.live_code import LiveCode; print(json.dumps(LiveCode().deepinfer_live_code()))"
    )
    environment = envs.child_environment({"PYTHONHASHSEED": "7"})
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    there = json.loads(result.stdout.splitlines()[-1])
    assert there == {name: here[name] for name in there}
    assert len(there) == len(here)
    assert LiveCode().deepinfer_live_code() == here


def test_a_replaced_function_is_named_wherever_it_is_in_place() -> None:
    before = live_code()
    with row_tiles_off():
        assert changed(before) == {
            f"deepinfer_kernels.{name}.reference.tiled_matmul" for name in ("linear", "moe_experts", "hc_mix")
        }
    with window_short_after_the_first_request():
        assert changed(before) == {"deepinfer_plugin.model.step.window_slots"}
    assert changed(before) == set()


def test_a_replaced_method_or_constant_is_named() -> None:
    before = live_code()
    method = next(name for name in vars(Step) if f"deepinfer_plugin.model.step.Step.{name}" in before)
    with mock.patch.object(Step, method, _another):
        assert changed(before) == {f"deepinfer_plugin.model.step.Step.{method}"}
    constant = next(name for name, value in vars(row_tiles).items() if name.isupper() and isinstance(value, int))
    with mock.patch.object(row_tiles, constant, getattr(row_tiles, constant) + 1):
        assert f"deepinfer_kernels.row_tiles.{constant}" in changed(before)
