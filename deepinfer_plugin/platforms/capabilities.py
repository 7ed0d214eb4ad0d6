"""What the present machine offers, as one dataclass. Loads neither torch nor vLLM, initialises no device."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer_plugin import variables
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.platforms.ascend import AscendStack
from deepinfer_plugin.platforms.detect import Decision
from deepinfer_plugin.settings import Accelerator, Settings

NO_KERNEL_SET = "none"
"""What serves on an NPU."""

_BYTES_PER_MIB = 1 << 20


def kernel_set_of(device_type: str) -> str:
    """Kernels that serve on a type of device: the plain PyTorch references on ``cpu``, else what the variable says."""
    return "reference" if device_type == "cpu" else Settings.from_envs()[variables.KERNEL_SET]


def check_kernel_set(settings: Settings, decision: Decision) -> None:
    """Refuse a set of kernels that cannot run here.

    Raises:
        SettingError: TileLang's kernels are asked for without an NVIDIA GPU, or without TileLang.
    """
    if settings[variables.KERNEL_SET] == variables.KERNEL_SET.default:
        return
    asked = f"environment: {settings.environment.describe(variables.KERNEL_SET)}"
    if decision.accelerator is not Accelerator.NVIDIA:
        raise SettingError(f"{asked}, expected an NVIDIA GPU, found {decision.why}; unset it")
    if importlib.util.find_spec("tilelang") is None:
        raise SettingError(f"{asked}, expected TileLang to be installed; install the one vLLM names or unset it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One machine. ``memory_mib`` is that of one device, or of the host where there is no GPU."""

    accelerator: str
    device_name: str
    num_devices: int
    compute_capability: str | None
    memory_mib: int
    kernel_set: str

    @classmethod
    def from_decision(cls, decision: Decision) -> Capabilities:
        """Ask the driver's management library, or the kernel of the host, for names and sizes."""
        if decision.accelerator is Accelerator.NVIDIA:
            return cls._nvidia()
        if decision.accelerator is Accelerator.ASCEND:
            return cls._ascend()
        return cls(
            accelerator=decision.accelerator.value,
            device_name=_cpu_name(),
            num_devices=1,
            compute_capability=None,
            memory_mib=_host_memory_mib(),
            kernel_set=kernel_set_of("cpu"),
        )

    @classmethod
    def _ascend(cls) -> Capabilities:
        stack = AscendStack.of_host(is_active=True)
        return cls(
            accelerator=Accelerator.ASCEND.value,
            device_name=stack.device_name or "unknown",
            num_devices=stack.num_devices,
            compute_capability=None if stack.soc_version is None else str(stack.soc_version),
            memory_mib=_host_memory_mib(),
            kernel_set=NO_KERNEL_SET,
        )

    @classmethod
    def _nvidia(cls) -> Capabilities:
        nvml = importlib.import_module("pynvml")  # a dependency of vLLM
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            return cls(
                accelerator=Accelerator.NVIDIA.value,
                device_name=str(nvml.nvmlDeviceGetName(handle)),
                num_devices=int(nvml.nvmlDeviceGetCount()),
                compute_capability=f"{major}.{minor}",
                memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // _BYTES_PER_MIB,
                kernel_set=kernel_set_of("cuda"),
            )
        finally:
            nvml.nvmlShutdown()

    def to_json(self) -> dict[str, object]:
        """Plain values, for provenance and status."""
        return asdict(self)


def _cpu_name() -> str:
    for line in _read_proc("cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _host_memory_mib() -> int:
    for line in _read_proc("meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return 0


def _read_proc(name: str) -> list[str]:
    try:
        return Path("/proc", name).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
