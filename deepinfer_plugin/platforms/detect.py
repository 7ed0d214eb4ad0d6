"""The decision behind the platform entry point: who owns this host, and whether that is what the user asked for.

Loads neither torch nor vLLM and initialises no device.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from deepinfer_plugin import envs, variables
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.platforms.ascend import PLUGIN_NAME as ASCEND_PLUGIN
from deepinfer_plugin.platforms.ascend import AscendStack
from deepinfer_plugin.settings import Accelerator, Settings

PLATFORM_GROUP = "vllm.platform_plugins"
OWN_PACKAGE = "deepinfer_plugin"

CUDA_PLATFORM = "deepinfer_plugin.platforms.cuda.DeepInferCudaPlatform"
CPU_PLATFORM = "deepinfer_plugin.platforms.cpu.DeepInferCpuPlatform"
REFUSED_PLATFORM = "deepinfer_plugin.platforms.refused.RefusedPlatform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found.

    Attributes:
        num_nvidia: NVIDIA devices that this process may use.
        other_platforms: active platform plugins of other packages.
        ascend: parts of Ascend's software and devices.
        num_hidden: NVIDIA devices that CUDA_VISIBLE_DEVICES leaves out.
    """

    num_nvidia: int
    other_platforms: tuple[str, ...]
    ascend: AscendStack = field(default_factory=AscendStack)
    num_hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who serves this process.

    Attributes:
        accelerator: never AUTO.
        platform: a class path, or None: vLLM's own, or that of another plugin.
        why: for people.
        refusal: why the start has to end; names the wish and what was found.
        model_refusal: why our architecture is refused, while other models are served.
        warnings: what a user should know although the start goes on.
    """

    accelerator: Accelerator
    platform: str | None
    why: str
    refusal: str | None = None
    model_refusal: str | None = None
    warnings: tuple[str, ...] = ()


def find_machine() -> Machine:
    """Look at this host. NVIDIA devices hidden by CUDA_VISIBLE_DEVICES do not count."""
    num_nvidia, others = len(visible_gpus()), _active_other_platforms()
    return Machine(
        num_nvidia=num_nvidia,
        num_hidden=_count_nvidia() - num_nvidia,
        other_platforms=others,
        ascend=AscendStack.of_host(is_active=ASCEND_PLUGIN in others),
    )


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA devices that this process may use, named as CUDA_VISIBLE_DEVICES names them: numbers or UUIDs.

    As CUDA reads it, the first entry says which of these they are, the list ends in front of the first entry that is
    none, and one that comes twice hides all. Of several MIG instances CUDA uses the first.
    """
    numbers = [str(number) for number in range(_count_nvidia())]
    visible = envs.cuda_visible_devices()
    if visible is None or not numbers:
        return tuple(numbers)
    entries = [entry.strip() for entry in visible.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), "")
    named = list(itertools.takewhile(lambda entry: entry.startswith(kind) if kind else entry in numbers, entries))
    if len(set(named)) < len(named):
        return ()
    return tuple(named[:1] if kind == "MIG-" else named)


def rank_places() -> int:
    """How many ranks on GPUs this process may start: one for each GPU, or DEEPINFER_RANKS_PER_GPU."""
    return len(visible_gpus()) * Settings.from_envs()[variables.RANKS_PER_GPU]


def decide(accelerator: Accelerator, machine: Machine) -> Decision:
    """Choose the platform. A wish that the machine cannot fulfil comes back as ``refusal``, which names both sides."""
    others = ", ".join(machine.other_platforms)
    has_ascend = ASCEND_PLUGIN in machine.other_platforms
    if accelerator is Accelerator.AUTO:
        if has_ascend:
            return _ascend(machine, f"platform plugin {others} owns this process")
        if machine.other_platforms:
            return Decision(
                accelerator=Accelerator.CPU, platform=None, why=f"platform plugin {others} owns this process"
            )
        return _nvidia(machine) if machine.num_nvidia > 0 else _bare(machine)

    if accelerator is Accelerator.NVIDIA:
        if machine.num_nvidia > 0 and not machine.other_platforms:
            return _nvidia(machine)
        return _refuse(
            accelerator,
            f"platform plugin {others}" if others else f"no NVIDIA GPU{_also_npus(machine)}",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use DEEPINFER_ACCELERATOR=cpu",
        )

    if accelerator is Accelerator.ASCEND:
        if has_ascend:
            return _ascend(machine, "vllm-ascend owns this process")
        gpus = f" and {machine.num_nvidia} NVIDIA GPU(s)" if machine.num_nvidia else ""
        return _refuse(
            accelerator,
            f"no active platform plugin {ASCEND_PLUGIN!r}{gpus}",
            f"it lacks {machine.ascend.to_text()}; use DEEPINFER_ACCELERATOR=auto",
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
    as a class that raises when vLLM makes an instance of it. Where another plugin is active a second class would end in
    vLLM's "Only one platform plugin can be activated": there the other one is left alone, and ``register()`` refuses.
    """
    try:
        decision = current_decision()
        if decision is None or decision.platform is None:
            return None
        if decision.platform == CPU_PLATFORM:
            envs.prepare_interpreter_environment()
    except (PlatformError, SettingError):
        return None if _active_other_platforms() else REFUSED_PLATFORM
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


def _ascend(machine: Machine, why: str) -> Decision:
    """vllm-ascend serves; our architecture is refused with what is missing."""
    text = (
        f"platform: DeepseekV41ForCausalLM is not served by this plugin beside vllm-ascend, which owns this process: "
        f"missing are {machine.ascend.to_text()}; set DEEPINFER_BATCH_INVARIANT=0 to leave the architecture to vLLM"
    )
    return Decision(accelerator=Accelerator.ASCEND, platform=None, why=why, model_refusal=text, warnings=(text,))


def _bare(machine: Machine) -> Decision:
    why = "no accelerator was found"
    warnings: tuple[str, ...] = ()
    if machine.num_hidden > 0:
        why = f"CUDA_VISIBLE_DEVICES hides all {machine.num_hidden} NVIDIA GPU(s)"
        warnings = (f"platform: {why}, the CPU serves; DEEPINFER_ACCELERATOR=cpu says that this is meant",)
    elif machine.ascend.num_devices > 0:
        why = f"the {machine.ascend.num_devices} Ascend NPU(s) cannot be used"
        warnings = (f"platform: {why}, the CPU serves: missing are {machine.ascend.to_text()}",)
    return Decision(accelerator=Accelerator.CPU, platform=CPU_PLATFORM, why=why, warnings=warnings)


def _also_npus(machine: Machine) -> str:
    return f" but {machine.ascend.num_devices} Ascend NPU(s)" if machine.ascend.num_devices else ""


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
