"""Ascend, with a stand-in for ``torch_npu``: what is found and missing, and vllm-ascend's own start beside ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer_plugin import platform
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.platforms import ascend, detect
from deepinfer_plugin.platforms.ascend import AscendStack
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.settings import Accelerator

THEIR_PLATFORM = "vllm_ascend.platform.NPUPlatform"
WORKER = "a worker of this plugin for NPUs"
Host = Callable[..., None]


def torch_npu(count: int = 8, name: str = "Ascend950PR") -> ModuleType:
    """A stand-in that answers what the plugin asks."""
    module = ModuleType("torch_npu")
    module.npu = SimpleNamespace(  # type: ignore[attr-defined]
        device_count=lambda: count, get_device_name=lambda index: f"{name}-{index}", get_soc_version=lambda: 260
    )
    return module


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """Make this machine one with the given parts of the stack."""

    def make(
        *,
        files: int = 8,
        cann: bool = True,
        versions: dict[str, str] | None = None,
        npu: ModuleType | None = None,
        is_active: bool = True,
    ) -> None:
        installed = {"torch-npu": "2.14.0", "vllm-ascend": "0.33.0rc1"} if versions is None else versions

        def version(package: str) -> str:
            if package not in installed:
                raise PackageNotFoundError(package)
            return installed[package]

        devices = tmp_path / "dev"
        devices.mkdir()
        for name in ["davinci_manager", *(f"davinci{index}" for index in range(files))]:
            (devices / name).touch()
        plugin = ModuleType("vllm_ascend")
        plugin.register = lambda: THEIR_PLATFORM  # type: ignore[attr-defined]
        entries = [EntryPoint("deepinfer", "deepinfer_plugin:platform", detect.PLATFORM_GROUP)]
        if is_active:
            entries.append(EntryPoint("ascend", "vllm_ascend:register", detect.PLATFORM_GROUP))
        monkeypatch.setattr(ascend, "version", version)
        monkeypatch.setattr(ascend, "DEVICE_FOLDER", devices)
        monkeypatch.setattr(ascend, "CANN_FOLDER", tmp_path / "nowhere")
        monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path if cann else tmp_path / "nowhere"))
        monkeypatch.setitem(sys.modules, "torch_npu", npu)
        monkeypatch.setitem(sys.modules, "vllm_ascend", plugin)
        monkeypatch.setattr(detect, "entry_points", lambda group: entries)
        monkeypatch.setattr(detect, "_count_nvidia", lambda: 0)
        for name in ("DEEPINFER_ACCELERATOR", "DEEPINFER_DISABLE", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return make


def test_the_stand_in_is_asked_for_count_name_and_kind(host: Host) -> None:
    host(files=1, npu=torch_npu(count=4))
    stack = AscendStack.of_host(is_active=True)
    assert (stack.num_devices, stack.device_name, stack.soc_version) == (4, "Ascend950PR-0", 260)
    assert (stack.torch_npu, stack.vllm_ascend) == ("2.14.0", "0.33.0rc1")


def test_a_complete_host_lacks_our_worker_only(host: Host) -> None:
    host(npu=torch_npu())
    [missing] = AscendStack.of_host(is_active=True).missing
    assert missing.startswith(WORKER)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"npu": torch_npu(count=0)}, "an Ascend950 NPU with its driver"),
        ({"npu": torch_npu(name="Ascend910B3")}, "an Ascend950 NPU (this one is Ascend910B3-0)"),
        ({"npu": torch_npu(), "cann": False}, "CANN (in ASCEND_HOME_PATH or"),
        ({"npu": torch_npu(), "versions": {"vllm-ascend": "0.33.0"}}, "torch_npu"),
        (
            {"npu": torch_npu(), "versions": {"torch-npu": "2.10.0", "vllm-ascend": "0.23.0.post1"}},
            "a vllm-ascend release for vLLM 0.33 (vllm-ascend 0.23.0.post1 is for vLLM 0.23)",
        ),
        (
            {"npu": torch_npu(), "versions": {"torch-npu": "2.14.0"}, "is_active": False},
            "a vllm-ascend release for vLLM 0.33 (none is installed; the last one, 0.23.0.post1, is for vLLM 0.23)",
        ),
        ({"npu": torch_npu(), "is_active": False}, "its platform plugin (vllm-ascend is installed"),
    ],
)
def test_each_missing_part_is_named_and_nothing_else(host: Host, parts: dict[str, object], text: str) -> None:
    host(**parts)
    missing = AscendStack.of_host(is_active=bool(parts.get("is_active", True))).missing
    assert len(missing) == 2
    assert missing[0].startswith(text)
    assert missing[1].startswith(WORKER)


def test_a_bare_host_lists_everything_in_the_order_to_install_it(host: Host) -> None:
    host(files=0, cann=False, versions={}, is_active=False)
    words = ["NPU with its driver", "CANN", "torch_npu", "vllm-ascend release", WORKER]
    missing = AscendStack.of_host(is_active=False).missing
    assert len(missing) == len(words)
    assert [word for word, text in zip(words, missing, strict=True) if word not in text] == []


def test_without_an_active_plugin_torch_npu_is_not_imported_and_device_files_count(host: Host) -> None:
    def refuse() -> int:
        raise AssertionError("torch_npu was asked")

    asked = torch_npu()
    asked.npu.device_count = refuse
    host(files=3, npu=asked, is_active=False)
    stack = AscendStack.of_host(is_active=False)
    assert (stack.num_devices, stack.device_name) == (3, "")


def test_a_torch_npu_that_cannot_load_leaves_the_device_files(host: Host) -> None:
    host(files=2, npu=None)  # importing it raises ImportError
    assert AscendStack.of_host(is_active=True).num_devices == 2


@pytest.mark.parametrize("wish", ["auto", "ascend"])
def test_vllm_ascend_serves_and_our_architecture_is_refused_with_the_list(
    host: Host, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    host(npu=torch_npu(), versions={"torch-npu": "2.10.0", "vllm-ascend": "0.23.0.post1"})
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", wish)
    decision = current_decision()
    assert decision is not None
    assert (decision.accelerator, decision.platform, decision.refusal) == (Accelerator.ASCEND, None, None)
    assert decision.warnings == (decision.model_refusal,)
    for text in ("vllm-ascend 0.23.0.post1 is for vLLM 0.23", WORKER, "DEEPINFER_BATCH_INVARIANT=0"):
        assert text in str(decision.model_refusal)
    machine = Capabilities.from_decision(decision)
    assert (machine.device_name, machine.num_devices, machine.kernel_set) == ("Ascend950PR-0", 8, "none")


@pytest.mark.parametrize(
    ("wish", "is_active", "texts"),
    [
        ("ascend", False, ("'ascend'", "no active platform plugin 'ascend'", "it lacks", WORKER)),
        ("nvidia", False, ("'nvidia'", "no NVIDIA GPU but 8 Ascend NPU(s)")),
        ("nvidia", True, ("'nvidia'", "platform plugin ascend")),
        ("cpu", True, ("'cpu'", "active platform plugin ascend", "VLLM_PLUGINS=deepinfer")),
    ],
)
def test_a_wish_against_this_host_names_both_sides(
    host: Host, monkeypatch: pytest.MonkeyPatch, wish: str, is_active: bool, texts: tuple[str, ...]
) -> None:
    host(npu=torch_npu(), is_active=is_active)
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", wish)
    with pytest.raises(PlatformError) as caught:
        current_decision()
    assert [text for text in texts if text not in str(caught.value)] == []


def test_npus_that_nothing_can_use_are_a_warning_where_the_cpu_serves(host: Host) -> None:
    host(files=2, versions={}, is_active=False)
    decision = current_decision()
    assert decision is not None
    assert (decision.accelerator, decision.platform) == (Accelerator.CPU, detect.CPU_PLATFORM)
    [warning] = decision.warnings
    assert "2 Ascend NPU(s)" in warning
    assert "a vllm-ascend release for vLLM 0.33" in warning


@pytest.mark.usefixtures("vllm_variables")
@pytest.mark.parametrize("wish", ["auto", "ascend", "nvidia", "cpu"])
@pytest.mark.parametrize("is_ours_first", [True, False])
def test_vllm_selects_vllm_ascend_whatever_the_user_wishes(
    host: Host, monkeypatch: pytest.MonkeyPatch, wish: str, is_ours_first: bool
) -> None:
    from vllm import platforms

    asked: list[str] = []

    def ours() -> str | None:
        asked.append(wish)
        return platform()

    host(npu=torch_npu())
    plugins = {"deepinfer": ours, "ascend": lambda: THEIR_PLATFORM}
    if not is_ours_first:
        plugins = dict(reversed(plugins.items()))
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", wish)
    monkeypatch.setattr(platforms, "load_plugins_by_group", lambda group: plugins)
    assert platforms.resolve_current_platform_cls_qualname() == THEIR_PLATFORM
    assert asked == [wish]
