"""The platform of a host without an accelerator: vLLM's CPU platform on model runner V2."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(f"vllm.{__name__}")

WORKER_CLASS = "deepinfer_plugin.worker.cpu_worker.DeepInferCpuWorker"


class DeepInferCpuPlatform(CpuPlatform):
    """``CpuPlatform`` of the released (CUDA) wheel, without the compiled CPU extension.

    Kernels of vLLM's model runner run in Triton's interpreter; our model calls the plain PyTorch references.
    Numbers are right, speed is for tests and development.
    """

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel carries no CPU kernels for this lane; nothing to import."""

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
        super().check_and_update_config(vllm_config)
        if cls._serves_our_model(vllm_config):
            (
                cache.block_size,
                cache.enable_prefix_caching,
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
            ) = kept
        if vllm_config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            vllm_config.parallel_config.worker_cls = WORKER_CLASS
        vllm_config.compilation_config.custom_ops = ["none"]
        vllm_config.kernel_config.enable_jit_warmup = False  # the interpreter compiles nothing

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Our layers choose their block size themselves (cache/specs.py); other models follow vLLM."""
        if not cls._serves_our_model(vllm_config):
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

    @staticmethod
    def _serves_our_model(vllm_config: "VllmConfig") -> bool:
        model_config = vllm_config.model_config
        return model_config is not None and getattr(model_config.hf_config, "model_type", "") == "deepseek_v41"
