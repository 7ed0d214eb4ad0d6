"""Everything about Ascend, behind one object: what a host has of its stack, and what is missing to serve our model.

Nothing of it was run on an NPU; the tests put a stand-in in the place of ``torch_npu``. Beside vllm-ascend the plugin
stands back: other models are served as without it, and our architecture is refused with the list of what is missing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepinfer_plugin import compat, envs

PLUGIN_NAME = "ascend"  # of vllm-ascend's entry point
SERIES = "Ascend950"  # whose matrix units read the number formats of the checkpoint
LAST_RELEASE = "0.23.0.post1"  # of vllm-ascend, 2026-11-30
DEVICE_FOLDER = Path("/dev")
CANN_FOLDER = Path("/usr/local/Ascend")


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendStack:
    """What was found. An empty text: not there, or not known.

    Attributes:
        num_devices: NPUs, as ``torch_npu`` counts them where it is loaded, else device files.
        device_name: of the first NPU.
        soc_version: number of the chip's kind, for reports; None without ``torch_npu``.
        cann: folder of CANN.
        torch_npu: version.
        vllm_ascend: version.
        is_active: whether vllm-ascend's platform plugin claims this host.
    """

    num_devices: int = 0
    device_name: str = ""
    soc_version: int | None = None
    cann: str = ""
    torch_npu: str = ""
    vllm_ascend: str = ""
    is_active: bool = False

    @classmethod
    def of_host(cls, *, is_active: bool) -> AscendStack:
        """Look at this host. ``torch_npu`` is imported only where vllm-ascend is active, and so has imported it."""
        seen = _ask_torch_npu() if is_active else None
        num_devices, device_name, soc_version = seen or (_count_device_files(), "", None)
        return cls(
            num_devices=num_devices,
            device_name=device_name,
            soc_version=soc_version,
            cann=_cann_folder(),
            torch_npu=_installed("torch-npu"),
            vllm_ascend=_installed("vllm-ascend"),
            is_active=is_active,
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """What our model needs and this host or this version of the plugin has not, in the order to install it."""
        found: list[str] = []
        if self.num_devices == 0:
            found.append(f"an {SERIES} NPU with its driver (no {DEVICE_FOLDER / 'davinci0'})")
        elif self.device_name and not self.device_name.startswith(SERIES):
            found.append(f"an {SERIES} NPU (this one is {self.device_name})")
        if not self.cann:
            found.append(f"CANN (in ASCEND_HOME_PATH or {CANN_FOLDER})")
        if not self.torch_npu:
            found.append("torch_npu")
        found += self._missing_release()
        found.append("a worker of this plugin for NPUs, which its sampler and its start-up proof need (not built)")
        return tuple(found)

    def _missing_release(self) -> list[str]:
        wanted = f"a vllm-ascend release for vLLM {compat.SUPPORTED_SERIES}"
        if not self.vllm_ascend:
            return [f"{wanted} (none is installed; the last one, {LAST_RELEASE}, is for vLLM 0.23)"]
        if not compat.is_of_supported_series(self.vllm_ascend):
            return [f"{wanted} (vllm-ascend {self.vllm_ascend} is for vLLM {compat.series(self.vllm_ascend)})"]
        if not self.is_active:
            return [
                f"its platform plugin (vllm-ascend is installed, but {PLUGIN_NAME!r} is not active: see VLLM_PLUGINS)"
            ]
        return []

    def to_text(self) -> str:
        """The missing parts as one phrase."""
        return ", ".join(self.missing)


def _count_device_files() -> int:
    """One file per NPU: davinci0, davinci1, …; davinci_manager is the driver's own."""
    return sum(path.name.removeprefix("davinci").isdigit() for path in DEVICE_FOLDER.glob("davinci*"))


def _ask_torch_npu() -> tuple[int, str, int | None] | None:
    """Number of NPUs, name and kind of the first; None where the library cannot be loaded."""
    try:
        npu = importlib.import_module("torch_npu").npu
        count = int(npu.device_count())
        return (count, str(npu.get_device_name(0)), int(npu.get_soc_version())) if count else (0, "", None)
    except (ImportError, OSError, RuntimeError):  # it loads the driver's libraries
        return None


def _cann_folder() -> str:
    folder = Path(envs.ascend_home() or CANN_FOLDER)
    return str(folder) if folder.is_dir() else ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
