"""The one place that decides which implementation an operation runs."""

import enum

import torch


class KernelSet(enum.Enum):
    """Kernels of the operations on a GPU. ``TILELANG`` are those below; every other operation keeps its Triton one."""

    TRITON = "triton"
    TILELANG = "tilelang"


TILELANG_OPERATIONS = ("engram_gate", "hc_mix", "hc_post", "moe_experts", "sparse_attention")

_chosen = KernelSet.TRITON


def choose_kernel_set(kernel_set: KernelSet) -> None:
    """Let this process run ``kernel_set`` from now on; a process starts with Triton's."""
    global _chosen
    _chosen = kernel_set


def chosen_kernel_set() -> KernelSet:
    """The set that this process runs."""
    return _chosen


def use_triton(x: torch.Tensor) -> bool:
    """True where ``x`` lies on an NVIDIA GPU: the operation launches its Triton kernel. Elsewhere the reference runs.

    The answer depends on the device alone, so a process with ``TRITON_INTERPRET=1`` keeps calling references on CPU.
    """
    return x.is_cuda


def use_tilelang(x: torch.Tensor) -> bool:
    """True where an operation of ``TILELANG_OPERATIONS`` takes its TileLang kernel. Only then is TileLang imported."""
    return _chosen is KernelSet.TILELANG and x.is_cuda
