"""The platform decision as a table, and what vLLM is given where the machine is refused."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.platforms import detect
from deepinfer_plugin.platforms.ascend import AscendStack
from deepinfer_plugin.platforms.detect import CPU_PLATFORM, CUDA_PLATFORM, REFUSED_PLATFORM, Decision, Machine, decide
from deepinfer_plugin.platforms.refused import RefusedPlatform
from deepinfer_plugin.settings import Accelerator

MEANT = "DEEPINFER_ACCELERATOR=cpu says that this is meant"
BARE = Machine(num_nvidia=0, other_platforms=())
GPU = Machine(num_nvidia=2, other_platforms=())
NPU = Machine(num_nvidia=0, other_platforms=("ascend",))
OTHER = Machine(num_nvidia=0, other_platforms=("other",))
GPU_AND_NPU = Machine(num_nvidia=2, other_platforms=("ascend",))
IDLE_NPU = Machine(num_nvidia=0, other_platforms=(), ascend=AscendStack(num_devices=2))
MACHINES = (BARE, GPU, NPU, OTHER, GPU_AND_NPU, IDLE_NPU)
AUTO, NVIDIA, ASCEND, CPU = Accelerator


@pytest.mark.parametrize(
    ("wish", "machine", "chosen", "platform"),
    [
        (AUTO, BARE, CPU, CPU_PLATFORM),
        (AUTO, GPU, NVIDIA, CUDA_PLATFORM),
        (AUTO, NPU, ASCEND, None),
        (AUTO, OTHER, CPU, None),
        (AUTO, GPU_AND_NPU, ASCEND, None),
        (AUTO, IDLE_NPU, CPU, CPU_PLATFORM),
        (NVIDIA, GPU, NVIDIA, CUDA_PLATFORM),
        (ASCEND, NPU, ASCEND, None),
        (ASCEND, GPU_AND_NPU, ASCEND, None),
        (CPU, IDLE_NPU, CPU, CPU_PLATFORM),
        (CPU, BARE, CPU, CPU_PLATFORM),
        (CPU, GPU, CPU, CPU_PLATFORM),
    ],
)
def test_a_wish_the_machine_can_fulfil(
    wish: Accelerator, machine: Machine, chosen: Accelerator, platform: str | None
) -> None:
    decision = decide(wish, machine)
    assert (decision.accelerator, decision.platform, decision.refusal) == (chosen, platform, None)


@pytest.mark.parametrize(
    ("wish", "machine", "found"),
    [
        (NVIDIA, BARE, "no NVIDIA GPU"),
        (NVIDIA, NPU, "platform plugin ascend"),
        (NVIDIA, OTHER, "platform plugin other"),
        (NVIDIA, GPU_AND_NPU, "platform plugin ascend"),
        (NVIDIA, IDLE_NPU, "no NVIDIA GPU but 2 Ascend NPU(s)"),
        (ASCEND, BARE, "no active platform plugin 'ascend'"),
        (ASCEND, GPU, "no active platform plugin 'ascend' and 2 NVIDIA GPU(s)"),
        (ASCEND, OTHER, "no active platform plugin 'ascend'"),
        (ASCEND, IDLE_NPU, "no active platform plugin 'ascend'"),
        (CPU, NPU, "active platform plugin ascend"),
        (CPU, OTHER, "active platform plugin other"),
        (CPU, GPU_AND_NPU, "active platform plugin ascend"),
    ],
)
def test_a_wish_the_machine_cannot_fulfil_names_both(wish: Accelerator, machine: Machine, found: str) -> None:
    refusal = decide(wish, machine).refusal
    assert refusal is not None
    assert f"DEEPINFER_ACCELERATOR is '{wish.value}'" in refusal
    assert found in refusal


def test_every_wish_on_every_machine_is_fulfilled_or_refused_and_no_platform_is_doubled() -> None:
    decisions = {(wish, machine): decide(wish, machine) for wish in Accelerator for machine in MACHINES}
    assert len(decisions) == 24
    for (wish, machine), decision in decisions.items():
        assert decision.accelerator is not AUTO
        assert decision.refusal is None or wish is not AUTO
        assert decision.platform is None or machine.other_platforms == ()
        assert (decision.model_refusal is None) == (decision.refusal is not None or decision.accelerator is not ASCEND)


def use(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(detect, "find_machine", lambda: machine)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("DEEPINFER_ACCELERATOR", "DEEPINFER_DISABLE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # restored afterwards: the CPU platform sets it


def test_the_cpu_platform_is_given_on_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BARE)
    assert detect.platform_class() == CPU_PLATFORM


def test_a_gpu_gets_our_cuda_platform_and_keeps_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert detect.platform_class() == CUDA_PLATFORM
    assert envs.cuda_visible_devices() == "0,1"


def test_a_disabled_plugin_gives_no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BARE)
    monkeypatch.setenv("DEEPINFER_DISABLE", "1")
    assert detect.platform_class() is None


def test_a_refused_machine_raises_when_vllm_makes_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BARE)
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nvidia")
    assert detect.platform_class() == REFUSED_PLATFORM
    with pytest.raises(PlatformError, match="'nvidia', but this machine has no NVIDIA GPU"):
        RefusedPlatform()


def test_a_bad_value_raises_when_vllm_makes_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BARE)
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "half")
    assert detect.platform_class() == REFUSED_PLATFORM
    with pytest.raises(SettingError, match="DEEPINFER_ARITHMETIC is 'half'"):
        RefusedPlatform()


@pytest.mark.parametrize(
    ("visible", "num_nvidia"), [("", 0), ("-1", 0), ("0", 1), ("1,2", 2), ("7", 0), ("0,0", 0), (None, 3)]
)
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, num_nvidia: int) -> None:
    monkeypatch.setattr(detect, "_count_nvidia", lambda: 3)
    monkeypatch.setattr(detect, "entry_points", lambda group: [])
    monkeypatch.setattr(AscendStack, "of_host", lambda is_active: AscendStack())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect.find_machine()
    assert machine == Machine(num_nvidia=num_nvidia, num_hidden=3 - num_nvidia, other_platforms=())
    decision = decide(Accelerator.AUTO, machine)
    assert decision.platform == (CUDA_PLATFORM if num_nvidia else CPU_PLATFORM)
    said = [f"platform: CUDA_VISIBLE_DEVICES hides all 3 NVIDIA GPU(s), the CPU serves; {MEANT}"]
    assert list(decision.warnings) == ([] if num_nvidia else said)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2", ("2",)),
        ("2, 0", ("2", "0")),
        ("1,3,0", ("1",)),
        ("0,-1,1", ("0",)),
        ("GPU-5a,GPU-77", ("GPU-5a", "GPU-77")),
        ("0,0", ()),
        ("0,1,0", ()),
        ("GPU-5a,GPU-5a", ()),
        ("0,GPU-77", ("0",)),
        ("GPU-5a,1", ("GPU-5a",)),
        ("GPU-5a,MIG-77", ("GPU-5a",)),
        ("MIG-5a,MIG-77", ("MIG-5a",)),
    ],
)
def test_gpus_are_named_as_the_user_lists_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: tuple[str, ...]
) -> None:
    monkeypatch.setattr(detect, "_count_nvidia", lambda: 3)
    monkeypatch.setattr(envs, "cuda_visible_devices", lambda: visible)
    assert detect.visible_gpus() == found


def test_a_list_names_no_gpus_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_count_nvidia", lambda: 0)
    monkeypatch.setattr(envs, "cuda_visible_devices", lambda: "GPU-5a,0")
    assert detect.visible_gpus() == ()


def foreign_module() -> ModuleType:
    """A module of another package: one plugin that claims the host, one that does not, one that fails."""

    def broken() -> str:
        raise ImportError("no device library")

    module = ModuleType("foreign")
    vars(module).update(active=lambda: "some.Platform", inactive=lambda: None, broken=broken)
    return module


@pytest.mark.parametrize(("allowed", "found"), [(None, ("yes",)), ("deepinfer", ()), ("deepinfer,yes", ("yes",))])
def test_other_platform_plugins_are_asked_as_vllm_asks_them(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, found: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "foreign", foreign_module())
    entries = [
        EntryPoint("deepinfer", "deepinfer_plugin:platform", detect.PLATFORM_GROUP),
        EntryPoint("yes", "foreign:active", detect.PLATFORM_GROUP),
        EntryPoint("no", "foreign:inactive", detect.PLATFORM_GROUP),
        EntryPoint("bad", "foreign:broken", detect.PLATFORM_GROUP),
    ]
    monkeypatch.setattr(detect, "entry_points", lambda group: entries)
    monkeypatch.setattr(detect, "_count_nvidia", lambda: 0)
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert detect.find_machine().other_platforms == found


def test_a_decision_says_why() -> None:
    decisions: list[Decision] = [decide(AUTO, machine) for machine in (BARE, GPU, NPU, OTHER)]
    assert all(decision.why for decision in decisions)
