"""Ranks that share a GPU: which one each gets, and what the start needs for it. Devices are stand-ins."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.errors import ConfigError, PlatformError
from deepinfer_plugin.platforms import shared_gpus
from deepinfer_plugin.platforms.shared_gpus import share_gpus

pytestmark = pytest.mark.usefixtures("vllm_variables")


@pytest.fixture(autouse=True)
def two_ranks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_RANKS_PER_GPU", "2")
    monkeypatch.setenv(envs.NCCL_SHARING_SWITCH, "0")
    monkeypatch.setattr(shared_gpus, "_nccl_version", lambda: (2, 30))


def config_of(tensor_size: int = 2, cache_bytes: int | None = 1 << 28, device_ids: list[int] | None = None) -> Any:
    from vllm.config import VllmConfig

    config = copy.deepcopy(VllmConfig())
    config.cache_config.kv_cache_memory_bytes = cache_bytes
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tensor_size
    config.parallel_config.assigned_physical_gpu_ids = device_ids
    return config


@pytest.mark.parametrize(
    ("device_ids", "physical_ids", "expected"),
    [(None, [0], [0, 0]), (None, [3, 1], [3, 3, 1, 1]), ([5, 4], [4, 5], [5, 5, 4, 4])],
)
def test_ranks_in_a_row_share_a_gpu(device_ids: list[int] | None, physical_ids: list[int], expected: list[int]) -> None:
    config = config_of(device_ids=device_ids)
    for _ in range(2):  # vLLM asks several times
        share_gpus(config, physical_ids)
    assert config.parallel_config.assigned_physical_gpu_ids == expected
    assert envs.child_environment()[envs.NCCL_SHARING_SWITCH] == "1"


def test_an_old_nccl_is_refused_where_ranks_would_meet_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_gpus, "_nccl_version", lambda: (2, 28))
    with pytest.raises(PlatformError, match=r"DEEPINFER_RANKS_PER_GPU is 2, but NCCL is 2\.28, expected 2\.30"):
        share_gpus(config_of(), [0])
    share_gpus(config_of(tensor_size=1), [0])
    assert envs.child_environment()[envs.NCCL_SHARING_SWITCH] == "0"


def test_the_size_of_the_cache_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"DEEPINFER_RANKS_PER_GPU is 2.*--kv-cache-memory-bytes"):
        share_gpus(config_of(cache_bytes=None), [0])


def test_the_version_is_that_of_the_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import pynccl_wrapper

    monkeypatch.undo()
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", lambda: SimpleNamespace(ncclGetRawVersion=lambda: 23007))
    assert shared_gpus._nccl_version() == (2, 30)
