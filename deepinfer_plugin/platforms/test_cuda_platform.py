"""Our CUDA platform above vLLM's real one, on a host without a driver: devices are stand-ins."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.errors import ConfigError, PlatformError
from deepinfer_plugin.platforms import shared_gpus

OUR_WORKER = "deepinfer_plugin.worker.cuda_worker.DeepInferCudaWorker"
STOCK_WORKER = "vllm.v1.worker.gpu_worker.Worker"
MODULES = ("vllm.platforms.cuda", "deepinfer_plugin.platforms.cuda")

pytestmark = pytest.mark.usefixtures("vllm_variables")


class Devices:
    """What the platform is told about four cards, and how often it asked."""

    def __init__(self, capability: tuple[int, int], memory_bytes: int) -> None:
        self.asked = 0
        self.capability, self.memory_bytes = capability, memory_bytes

    def get_device_capability(self, index: int = 0) -> Any:
        self.asked += 1
        return SimpleNamespace(major=self.capability[0], minor=self.capability[1])

    def get_device_name(self, index: int = 0) -> str:
        return f"Card {index}"

    def get_device_total_memory(self, index: int = 0) -> int:
        return self.memory_bytes

    def device_count(self) -> int:
        return 4

    def give_to(self, monkeypatch: pytest.MonkeyPatch, platform: Any) -> None:
        for name in ("get_device_capability", "get_device_name", "get_device_total_memory", "device_count"):
            monkeypatch.setattr(platform, name, getattr(self, name))


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """vLLM's CUDA platform and ours. Its compiled extension needs a driver and is not called."""
    import vllm.platforms  # noqa: F401

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    theirs, ours = (importlib.import_module(name) for name in MODULES)
    assert issubclass(ours.DeepInferCudaPlatform, theirs.CudaPlatform)
    yield theirs.CudaPlatform, ours.DeepInferCudaPlatform
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)


def engine_config(hf_config: Any, tensor_size: int = 1) -> Any:
    """vLLM's own configuration objects around a model that is only described."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.parallel_config.worker_cls = "auto"
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tensor_size
    config.model_config = SimpleNamespace(hf_config=hf_config, is_mm_prefix_lm=False, supports_multimodal_inputs=False)
    return config


def llama() -> Any:
    from transformers import LlamaConfig

    return engine_config(LlamaConfig(hidden_size=64, num_hidden_layers=2))


@pytest.fixture
def nano(checkpoint: Any) -> Any:
    """The flattened configuration that vLLM makes of a small checkpoint."""
    from vllm.transformers_utils.config import get_config

    return get_config(checkpoint("nano", 0), trust_remote_code=False)


def updated(platform: Any, config: Any) -> Any:
    """A copy after two calls: vLLM asks several times."""
    config = copy.deepcopy(config)
    for _ in range(2):
        platform.check_and_update_config(config)
    return config


@pytest.mark.parametrize("is_handed_back", [False, True])
def test_a_model_that_is_not_ours_passes_as_through_vllms_platform(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch, is_handed_back: bool
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", str(int(not is_handed_back)))
    devices = Devices((12, 0), 1)  # ours would be refused on them
    devices.give_to(monkeypatch, platforms[1])
    config = engine_config(nano) if is_handed_back else llama()
    theirs, ours = (updated(platform, config) for platform in platforms)
    assert repr(theirs) == repr(ours)
    assert repr(config) != repr(ours)
    assert (ours.parallel_config.worker_cls, ours.load_config.load_format, devices.asked) == (STOCK_WORKER, "auto", 0)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_our_model_gets_our_worker_and_reader_on_served_devices(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    devices = Devices(capability, 1 << 37)
    devices.give_to(monkeypatch, platforms[1])
    config = updated(platforms[1], engine_config(nano, tensor_size=2))
    assert (config.parallel_config.worker_cls, config.load_config.load_format) == (OUR_WORKER, "deepinfer")
    assert config.parallel_config.disable_custom_all_reduce
    assert devices.asked == 4  # two of the four cards, in two calls


def test_ranks_that_share_cards_use_half_as_many(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_RANKS_PER_GPU", "2")
    monkeypatch.setattr(shared_gpus, "_nccl_version", lambda: (2, 30))
    monkeypatch.setenv(envs.NCCL_SHARING_SWITCH, "1")  # what the start sets is gone behind the test
    devices = Devices((9, 0), 1 << 37)
    devices.give_to(monkeypatch, platforms[0])  # ours counts places for ranks
    assert (platforms[0].device_count(), platforms[1].device_count()) == (4, 8)
    config = engine_config(nano, tensor_size=2)
    config.cache_config.kv_cache_memory_bytes = 1 << 28
    found = updated(platforms[1], config).parallel_config
    assert (found.assigned_physical_gpu_ids, devices.asked) == ([0, 0, 1, 1, 2, 2, 3, 3], 2)  # one card, in two calls
    monkeypatch.setenv("DEEPINFER_RANKS_PER_GPU", "1")
    assert updated(platforms[1], config).parallel_config.assigned_physical_gpu_ids is None


def test_our_model_is_refused_on_another_device_before_weights_are_read(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices((12, 0), 1 << 37).give_to(monkeypatch, platforms[1])
    with pytest.raises(PlatformError, match=r"device 0 \(Card 0, compute capability 12\.0\).*SM120 has 99 KiB"):
        updated(platforms[1], engine_config(nano))


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices((9, 0), 1 << 19).give_to(monkeypatch, platforms[1])
    with pytest.raises(ConfigError, match=r"weights of a rank take .* --tensor-parallel-size"):
        updated(platforms[1], engine_config(nano))


def test_a_stage_needs_memory_for_its_own_layers_only(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["deepinfer_plugin.platforms.cuda"]
    whole, stages = engine_config(nano), engine_config(nano)
    stages.parallel_config.pipeline_parallel_size = stages.parallel_config.world_size = 2
    Devices((9, 0), module._weight_bytes(whole)).give_to(monkeypatch, platforms[1])
    with pytest.raises(ConfigError, match="weights of a rank take"):
        updated(platforms[1], whole)
    assert updated(platforms[1], stages).parallel_config.worker_cls == OUR_WORKER


def test_memory_is_not_judged_where_weights_are_offloaded(
    platforms: tuple[Any, Any], nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices((9, 0), 1 << 20).give_to(monkeypatch, platforms[1])
    config = engine_config(nano)
    config.offload_config.uva.cpu_offload_gb = 1
    assert updated(platforms[1], config).parallel_config.worker_cls == OUR_WORKER


def test_the_checkpoint_of_the_test_is_ours(nano: Any, checkpoint: Any) -> None:
    on_disk = json.loads((Path(checkpoint("nano", 0)) / "config.json").read_text(encoding="utf-8"))
    assert nano.model_type == on_disk["model_type"] == "deepseek_v41"
