"""Ranks that take turns on a GPU: for proofs that the number of ranks changes no bit, where GPUs are few.

Every rank is a process with the kernels, graphs and exchanges that it has on a GPU of its own; the driver gives each a
slice of time, and an exchange waits for the slices of the others. Not beside CUDA's MPS, where processes compute at the
same time: engines of two ranks were seen to stand still there, and why was not found. Loads neither torch nor vLLM by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer_plugin import envs
from deepinfer_plugin.errors import ConfigError, PlatformError
from deepinfer_plugin.variables import RANKS_PER_GPU

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEAST_NCCL = (2, 30)
"""NCCL 2.28 knows no switch for it and refuses two ranks on a GPU; 2.30.7 has one."""


def ranks_per_gpu() -> int:
    """DEEPINFER_RANKS_PER_GPU, 1 where each rank has a GPU of its own."""
    return envs.load()[RANKS_PER_GPU]


def share_gpus(vllm_config: VllmConfig, physical_ids: Sequence[int]) -> None:
    """Give every GPU to several ranks in a row.

    Args:
        vllm_config: its map from ranks to GPUs is replaced. Calling it again changes nothing.
        physical_ids: the GPUs that this process may use, in their order; ``--device-ids`` counts before them.

    Raises:
        ConfigError: the size of the KV cache is left to a measurement, which would see what the other ranks take.
        PlatformError: NCCL is too old.
    """
    per_gpu = ranks_per_gpu()
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    asked_for = f"{RANKS_PER_GPU.name} is {per_gpu}"
    if cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"{asked_for}, and ranks that share a GPU cannot measure what is free of it: expected the size of the "
            "KV cache of a rank, --kv-cache-memory-bytes, and a --gpu-memory-utilization that is free at start"
        )
    if parallel.world_size * parallel.data_parallel_size > 1:
        _check_nccl(asked_for)
        envs.let_ranks_share_gpus()
    gpus = dict.fromkeys(parallel.assigned_physical_gpu_ids or physical_ids)
    parallel.assigned_physical_gpu_ids = [gpu for gpu in gpus for _ in range(per_gpu)]


def _check_nccl(asked_for: str) -> None:
    found = _nccl_version()
    if found < LEAST_NCCL:
        raise PlatformError(
            f"platform: {asked_for}, but NCCL is {'.'.join(map(str, found))}, expected {LEAST_NCCL[0]}.{LEAST_NCCL[1]} "
            f"or newer, which serves several ranks on a GPU; install a newer nvidia-nccl or unset {RANKS_PER_GPU.name}"
        )


def _nccl_version() -> tuple[int, int]:
    """Of the library that is loaded; PyTorch tells the one that it was built with."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    number = NCCLLibrary().ncclGetRawVersion()  # 2.30.7 is 23007
    return number // 10000, number // 100 % 100
