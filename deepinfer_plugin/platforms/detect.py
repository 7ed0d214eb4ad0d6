"""The decision behind the platform entry point: who owns this host, and whether that is what the user asked for.

Loads neither torch nor vLLM and initialises no device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.metadata import entry_points

from deepinfer_plugin import envs
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.settings import Accelerator, Settings

PLATFORM_GROUP = "vllm.platform_plugins"
OWN_PACKAGE = "deepinfer_plugin"
ASCEND_PLUGIN = "ascend"  # name of vllm-ascend's entry point

CUDA_PLATFORM = "deepinfer_plugin.platforms.cuda.DeepInferCudaPlatform"
CPU_PLATFORM = "deepinfer_plugin.platforms.cpu.DeepInferCpuPlatform"
REFUSED_PLATFORM = "deepinfer_plugin.platforms.refused.RefusedPlatform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found: NVIDIA devices this process may use, and active platform plugins of other packages."""

    num_nvidia: int
    other_platforms: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who serves this process. ``accelerator`` is never AUTO; ``platform`` is a class path or None (vLLM's own)."""

    accelerator: Accelerator
    platform: str | None
    why: str
    refusal: str | None = None


def find_machine() -> Machine:
    """Look at this host. NVIDIA devices hidden by CUDA_VISIBLE_DEVICES do not count."""
    visible = envs.cuda_visible_devices()
    hidden = visible is not None and (visible.strip() == "" or visible.strip().startswith("-"))
    return Machine(num_nvidia=0 if hidden else _count_nvidia(), other_platforms=_active_other_platforms())


def decide(accelerator: Accelerator, machine: Machine) -> Decision:
    """Choose the platform. A wish that the machine cannot fulfil comes back as ``refusal``, which names both sides."""
    others = ", ".join(machine.other_platforms)
    has_ascend = ASCEND_PLUGIN in machine.other_platforms
    if accelerator is Accelerator.AUTO:
        if machine.other_platforms:
            chosen = Accelerator.ASCEND if has_ascend else Accelerator.CPU
            return Decision(accelerator=chosen, platform=None, why=f"platform plugin {others} owns this process")
        if machine.num_nvidia > 0:
            return _nvidia(machine)
        return Decision(accelerator=Accelerator.CPU, platform=CPU_PLATFORM, why="no accelerator was found")

    if accelerator is Accelerator.NVIDIA:
        if machine.num_nvidia > 0 and not machine.other_platforms:
            return _nvidia(machine)
        found = f"platform plugin {others}" if others else "no NVIDIA GPU"
        return _refuse(
            accelerator, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use DEEPINFER_ACCELERATOR=cpu"
        )

    if accelerator is Accelerator.ASCEND:
        if has_ascend:
            return Decision(accelerator=accelerator, platform=None, why="vllm-ascend owns this process")
        return _refuse(
            accelerator,
            "no active platform plugin 'ascend'",
            "install CANN, torch_npu and a vllm-ascend release built for vLLM 0.33 (none is published: the last one, "
            "0.23.0.post1, is for vLLM 0.23), or use DEEPINFER_ACCELERATOR=auto",
        )

    if machine.other_platforms:
        return _refuse(
            accelerator,
            f"active platform plugin {others}, and vLLM allows one",
            "set VLLM_PLUGINS=deepinfer, uninstall the other, or use DEEPINFER_ACCELERATOR=auto",
        )
    return Decision(accelerator=accelerator, platform=CPU_PLATFORM, why="DEEPINFER_ACCELERATOR=cpu")


def platform_class() -> str | None:
    """What the platform entry point returns; prepares the environment where our CPU platform is chosen.

    vLLM turns an exception raised here into a warning and goes on without a platform. A refusal is therefore handed on
    as a class that raises when vLLM makes an instance of it.
    """
    try:
        decision = current_decision()
        if decision is None or decision.platform is None:
            return None
        if decision.platform == CPU_PLATFORM:
            envs.prepare_interpreter_environment()
    except (PlatformError, SettingError):
        return REFUSED_PLATFORM
    return decision.platform


def current_decision() -> Decision | None:
    """The decision for this process; None where DEEPINFER_DISABLE=1.

    Raises:
        SettingError: a DEEPINFER_* variable has a value outside its rule.
        PlatformError: DEEPINFER_ACCELERATOR asks for what is not there.
    """
    settings = Settings.from_envs()
    if settings.disable:
        return None
    decision = decide(settings.accelerator, find_machine())
    if decision.refusal is not None:
        raise PlatformError(decision.refusal)
    return decision


def _nvidia(machine: Machine) -> Decision:
    why = f"{machine.num_nvidia} NVIDIA GPU(s) found"
    return Decision(accelerator=Accelerator.NVIDIA, platform=CUDA_PLATFORM, why=why)


def _refuse(accelerator: Accelerator, found: str, advice: str) -> Decision:
    text = f"platform: DEEPINFER_ACCELERATOR is {accelerator.value!r}, but this machine has {found}; {advice}"
    return Decision(accelerator=accelerator, platform=None, why=text, refusal=text)


def _count_nvidia() -> int:
    """NVIDIA devices that the driver's management library reports; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _active_other_platforms() -> tuple[str, ...]:
    """Names of other packages' platform plugins that are allowed and claim this host, as vLLM itself would ask them."""
    allowed = envs.allowed_plugins()
    names: set[str] = set()
    for entry in entry_points(group=PLATFORM_GROUP):
        if entry.module.split(".")[0] == OWN_PACKAGE or (allowed is not None and entry.name not in allowed):
            continue
        try:
            if entry.load()() is not None:
                names.add(entry.name)
        except Exception:  # vLLM treats a plugin that fails here as inactive, and reports it
            continue
    return tuple(sorted(names))
