"""Kinds of GPU: memory and rates. One was measured; the others follow from datasheets, at its shares of theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.sizing.figures import COPY_TB_S, MATMUL_TFLOPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind.

    Attributes:
        name: as the command line has it.
        device_class: SM90 or SM100.
        memory_gib: of one.
        copy_tb_s: device-to-device copy, read + written.
        matmul_tflops: bf16 products.
        link_gb_s: NVLink, one direction.
        is_measured: whether kernels were timed on it.
    """

    name: str
    device_class: str
    memory_gib: float
    copy_tb_s: float
    matmul_tflops: float
    link_gb_s: float
    is_measured: bool = False


_DATASHEET_COPY = COPY_TB_S / 4.8  # what a copy reaches of the H200's 4.8 TB/s
_DATASHEET_MATMUL = MATMUL_TFLOPS / 989.0  # and 8192^3 through cuBLAS of its 989 TFLOP/s


def _of_datasheet(name: str, device_class: str, memory_gib: float, tb_s: float, tflops: float, link_gb_s: float) -> Gpu:
    return Gpu(
        name=name,
        device_class=device_class,
        memory_gib=memory_gib,
        copy_tb_s=tb_s * _DATASHEET_COPY,
        matmul_tflops=tflops * _DATASHEET_MATMUL,
        link_gb_s=link_gb_s,
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        replace(_of_datasheet("H200", "SM90", 139.8, 4.8, 989.0, 450.0), is_measured=True),
        _of_datasheet("H100", "SM90", 79.1, 3.35, 989.0, 450.0),
        _of_datasheet("H20", "SM90", 95.1, 4.0, 148.0, 450.0),
        _of_datasheet("B200", "SM100", 178.0, 8.0, 2250.0, 900.0),
        _of_datasheet("B300", "SM100", 267.0, 8.0, 2250.0, 900.0),
    )
}


def find_gpu(name: str, memory_gib: float | None) -> Gpu:
    """The kind of that name, with other memory where the user knows better.

    Raises:
        SettingError: the kind is not known, or the memory is not above 0.
    """
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise SettingError(
            f"sizing: --gpu is {name!r}, expected {', '.join(GPUS)}; no other kind serves our model (Ascend neither)"
        )
    if memory_gib is None:
        return gpu
    if not 0 < memory_gib < 4096:
        raise SettingError(f"sizing: --memory-gib is {memory_gib:g}, expected above 0 and below 4096, of one GPU")
    return replace(gpu, memory_gib=memory_gib)
