"""Which NVIDIA devices are served, by capability, and memory that is checked before any weight is read."""

from __future__ import annotations

import pytest

from deepinfer_plugin.errors import ConfigError, PlatformError
from deepinfer_plugin.platforms.nvidia import Device, check_devices, check_memory

GIB = 1 << 30


def device(capability: tuple[int, int] | None, index: int = 0, name: str = "GPU") -> Device:
    return Device(index=index, name=name, capability=capability, memory_bytes=80 * GIB)


@pytest.mark.parametrize(("capability", "device_class"), [((9, 0), "SM90"), ((10, 0), "SM100"), ((10, 3), "SM100")])
def test_a_served_device_has_a_class(capability: tuple[int, int], device_class: str) -> None:
    assert device(capability).device_class == device_class
    check_devices([device(capability, index) for index in range(8)])


@pytest.mark.parametrize(
    ("capability", "texts"),
    [
        ((7, 5), ("7.5", "SM75 has no TMA")),
        ((8, 0), ("8.0", "SM80 has no TMA")),
        ((8, 9), ("8.9", "SM89 has no TMA")),
        ((11, 0), ("11.0", "for SM110 no kernel")),
        ((12, 0), ("12.0", "SM120 has 99 KiB")),
        ((12, 1), ("12.1", "SM121 has 99 KiB")),
        (None, ("unknown", "the driver does not tell")),
    ],
)
def test_another_device_is_refused_by_name_and_reason(
    capability: tuple[int, int] | None, texts: tuple[str, ...]
) -> None:
    with pytest.raises(PlatformError) as caught:
        check_devices([device((9, 0)), device(capability, 1, "Other card")])
    text = str(caught.value)
    assert "device 1 (Other card" in text
    assert [
        part for part in (*texts, "9.0 (SM90), 10.0 or 10.3 (SM100)", "DEEPINFER_BATCH_INVARIANT=0") if part not in text
    ] == []


def test_two_classes_in_one_server_are_refused() -> None:
    with pytest.raises(PlatformError, match=r"device 0 .* is SM90 and device 1 .* is SM100, expected one class"):
        check_devices([device((9, 0)), device((10, 0), 1)])


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    check_memory([device((9, 0))], 72 * GIB, 0.9)
    with pytest.raises(ConfigError, match=r"take 72\.5 GiB, expected at most 72\.0 GiB, 0\.9 of device 0"):
        check_memory([device((9, 0))], 72 * GIB + GIB // 2, 0.9)
