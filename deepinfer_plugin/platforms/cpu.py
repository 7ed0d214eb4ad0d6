"""The platform of a host without an accelerator: vLLM's CPU platform on model runner V2."""

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deepinfer_plugin import envs, nesting_middleware, provenance_endpoint, witness
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.platforms.served import serves_our_model, use_our_worker
from deepinfer_plugin.sampling import seed_middleware
from deepinfer_plugin.scheduling import concurrent_batches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER_CLASS = "deepinfer_plugin.worker.cpu_worker.DeepInferCpuWorker"
ASYNC_SCHEDULING = "async_scheduling_on_cpu"
"""In ``--additional-config``: schedule a step ahead as on a GPU, so that tests without one meet what follows."""


def wants_async_scheduling(additional_config: object) -> bool:
    """Whether ``--additional-config`` asks for a step ahead; ConfigError for anything but true and false."""
    value = additional_config.get(ASYNC_SCHEDULING, False) if isinstance(additional_config, dict) else False
    if not isinstance(value, bool):
        raise ConfigError(f"additional_config: {ASYNC_SCHEDULING} is {value!r}, expected true or false")
    return value


class DeepInferCpuPlatform(CpuPlatform):
    """``CpuPlatform`` of the released (CUDA) wheel, without the compiled CPU extension.

    Kernels of vLLM's model runner run in Triton's interpreter; our model calls the plain PyTorch references.
    Numbers are right, speed is for tests and development.
    """

    _has_kernel_overrides = False

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel carries no CPU kernels for this lane; nothing to import."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the runner's kernels that are slow in the interpreter; vLLM's own list is compiled code."""
        from vllm.triton_utils.dispatcher import register_kernels

        from deepinfer_plugin.worker.cpu_kernels import OVERRIDES

        if not cls._has_kernel_overrides:
            cls._has_kernel_overrides = True
            register_kernels(OVERRIDES)

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Let a server return seeds, witnesses and its provenance; answers of other models stay as they are."""
        seed_middleware.add_to_server(parser)
        witness.add_to_server(parser)
        nesting_middleware.add_to_server(parser)
        provenance_endpoint.add_to_server(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply vLLM's CPU settings, then take back what it forbids to MLA models, which ours does not need.

        Runs several times in a process and must give the same result each time.
        """
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        kept = (
            cache.block_size,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        is_async = wants_async_scheduling(vllm_config.additional_config) and bool(scheduler.async_scheduling)
        executor = vllm_config.parallel_config.distributed_executor_backend
        with envs.worker_start_kept():  # vLLM asks for new processes, which import everything again
            super().check_and_update_config(vllm_config)
        if serves_our_model(vllm_config):
            (
                cache.block_size,
                cache.enable_prefix_caching,
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
            ) = kept
            scheduler.async_scheduling = is_async
            concurrent_batches.asked_for(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            use_our_worker(vllm_config, WORKER_CLASS)
        if executor == "uni":  # vLLM puts a process of its own around one worker to bind threads; we use one thread
            parallel.distributed_executor_backend = "uni"
        vllm_config.compilation_config.custom_ops = ["none"]
        vllm_config.kernel_config.enable_jit_warmup = False  # the interpreter compiles nothing

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Our layers choose their block size themselves (cache/specs.py); other models follow vLLM."""
        if not serves_our_model(vllm_config):
            super().update_block_size_for_backend(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """Other models than ours get vLLM's Triton attention, which the interpreter can run."""
        del selected_backend, attn_selector_config, num_heads
        path: str = AttentionBackendEnum.TRITON_ATTN.get_path()
        return path
