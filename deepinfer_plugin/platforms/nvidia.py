"""Which NVIDIA devices serve our model, and the checks of a configuration that need no weights.

Other models never come here. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_plugin.errors import ConfigError, PlatformError

CLASSES = {(9, 0): "SM90", (10, 0): "SM100", (10, 3): "SM100"}
"""Compute capability to the class of devices whose kernels are compiled in the tests."""

_WHERE = "DeepseekV41ForCausalLM"
_ADVICE = (
    "set DEEPINFER_BATCH_INVARIANT=0 to leave the architecture to vLLM, or DEEPINFER_ACCELERATOR=cpu for a small "
    "checkpoint"
)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU. ``capability`` is (major, minor), None where the driver does not say."""

    index: int
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int

    @property
    def device_class(self) -> str | None:
        """``SM90`` or ``SM100``; None: not served."""
        return CLASSES.get(self.capability) if self.capability is not None else None

    def __str__(self) -> str:
        capability = "unknown" if self.capability is None else "{}.{}".format(*self.capability)
        return f"device {self.index} ({self.name}, compute capability {capability})"


def why_not(capability: tuple[int, int] | None) -> str:
    """What a device lacks whose capability is not in ``CLASSES``."""
    if capability is None:
        return "the driver does not tell what it can do"
    name = "SM{}{}".format(*capability)
    if capability < (9, 0):
        return f"{name} has no TMA, through which the products of many rows load their tiles"
    if capability[0] == 12:
        return f"{name} has 99 KiB of shared memory for a program, tiles of the products take up to 144 KiB"
    return f"for {name} no kernel of the plugin is compiled or tested"


def check_devices(devices: Sequence[Device]) -> None:
    """Refuse what our kernels were not made for.

    Args:
        devices: those that the ranks of this host use.

    Raises:
        PlatformError: a device is of no served class, or two are of different ones.
    """
    for device in devices:
        if device.device_class is None:
            raise PlatformError(
                f"{_WHERE}: {device} is used, expected 9.0 (SM90), 10.0 or 10.3 (SM100); "
                f"{why_not(device.capability)}; {_ADVICE}"
            )
    for device in devices[1:]:
        if device.device_class != devices[0].device_class:
            raise PlatformError(
                f"{_WHERE}: {devices[0]} is {devices[0].device_class} and {device} is {device.device_class}, expected "
                "one class; each runs kernels of its own, and answers would depend on where a request lands; choose "
                "equal ones with CUDA_VISIBLE_DEVICES"
            )


def check_memory(devices: Sequence[Device], weight_bytes: int, usable_share: float) -> None:
    """Refuse weights that cannot fit, before hundreds of gigabytes are read.

    Args:
        devices: those that the ranks of this host use.
        weight_bytes: of the rank that holds most.
        usable_share: ``gpu_memory_utilization``.

    Raises:
        ConfigError: names both sizes.
    """
    for device in devices:
        usable = int(device.memory_bytes * usable_share)
        if weight_bytes > usable:
            raise ConfigError(
                f"{_WHERE}: the weights of a rank take {weight_bytes / _GIB:.1f} GiB, expected at most "
                f"{usable / _GIB:.1f} GiB, {usable_share:g} of {device}; share them among more ranks with "
                "--tensor-parallel-size or --enable-expert-parallel, python -m deepinfer_plugin sizing says which fit"
            )
