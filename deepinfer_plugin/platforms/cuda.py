"""vLLM's CUDA platform with what it has no other hook for: what a server returns beside answers, scores of prompts."""

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugin import nesting_middleware, provenance_endpoint, witness
from deepinfer_plugin.platforms.nvidia import Device, check_devices, check_memory
from deepinfer_plugin.platforms.served import serves_our_model, use_our_worker
from deepinfer_plugin.platforms.shared_gpus import ranks_per_gpu, share_gpus
from deepinfer_plugin.sampling import seed_middleware
from deepinfer_plugin.scheduling import concurrent_batches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

STOCK_WORKER_CLASS = "vllm.v1.worker.gpu_worker.Worker"
WORKER_CLASS = "deepinfer_plugin.worker.cuda_worker.DeepInferCudaWorker"


class DeepInferCudaPlatform(CudaPlatform):
    """Keeps ``_enum = CUDA``, so every check of vLLM for CUDA holds; other models than ours see no difference."""

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Let a server return seeds, witnesses and its provenance; answers of other models stay as they are."""
        super().pre_register_and_update(parser)
        seed_middleware.add_to_server(parser)
        witness.add_to_server(parser)
        nesting_middleware.add_to_server(parser)
        provenance_endpoint.add_to_server(parser)

    @classmethod
    def device_count(cls) -> int:
        """Places for ranks: the GPUs, or several times their number where ranks share them."""
        return int(super().device_count()) * ranks_per_gpu()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply vLLM's CUDA settings; where our model is served, check the devices and take our worker.

        Raises:
            PlatformError: our kernels were not made for a device that would be used, or NCCL cannot let ranks share it.
            ConfigError: the weights of the ranks of a device do not fit into it, more steps ahead than can be planned,
                or the size of a cache is not given where ranks share a device.
        """
        super().check_and_update_config(vllm_config)
        if not serves_our_model(vllm_config):
            return
        concurrent_batches.asked_for(vllm_config)
        if ranks_per_gpu() > 1:
            gpus = range(cls._num_gpus())
            share_gpus(vllm_config, [cls.visible_device_id_to_physical_device_id(index) for index in gpus])
        cls._check_devices(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == STOCK_WORKER_CLASS:
            use_our_worker(vllm_config, WORKER_CLASS)
        parallel.disable_custom_all_reduce = True  # no sum of our model crosses ranks

    @classmethod
    def _num_gpus(cls) -> int:
        return cls.device_count() // ranks_per_gpu()

    @classmethod
    def _check_devices(cls, vllm_config: "VllmConfig") -> None:
        """What can be known before any weight is read."""
        parallel, per_gpu = vllm_config.parallel_config, ranks_per_gpu()
        ranks = parallel.local_world_size * max(parallel.data_parallel_size_local, 1)
        devices = [cls._device(index) for index in range(min(-(-ranks // per_gpu), cls._num_gpus()))]
        check_devices(devices)
        if vllm_config.offload_config.uva.cpu_offload_gb == 0:
            cache = vllm_config.cache_config
            share = cache.gpu_memory_utilization if cache.kv_cache_memory_bytes is None else 1.0
            check_memory(devices, _weight_bytes(vllm_config), share / min(ranks, per_gpu))

    @classmethod
    def _device(cls, index: int) -> Device:
        capability = cls.get_device_capability(index)
        return Device(
            index=index,
            name=cls.get_device_name(index),
            capability=None if capability is None else (capability.major, capability.minor),
            memory_bytes=cls.get_device_total_memory(index),
        )


def _weight_bytes(vllm_config: "VllmConfig") -> int:
    """Most bytes of the weights of a rank, as the checkpoint stores them: packed weights stay packed."""
    from deepinfer_plugin.model.config import ModelConfig  # what follows loads kernels, and a platform is made early
    from deepinfer_plugin.model.parallel import dealt_ranks
    from deepinfer_plugin.model.stage import stages_of
    from deepinfer_plugin.sizing.memory import rank_weights

    config, parallel = ModelConfig.from_hf(vllm_config.model_config.hf_config), vllm_config.parallel_config
    of_stages = (
        rank_weights(
            config,
            parallel.tensor_parallel_size,
            dealt_ranks(vllm_config),
            has_drafts=vllm_config.speculative_config is not None,
            has_images=vllm_config.model_config.supports_multimodal_inputs,
            stage=stage,
        )
        for stage in stages_of(config, parallel.pipeline_parallel_size)
    )
    return max(sum(weights.values()) for weights in of_stages)
