"""vLLM's CUDA platform with what it has no other hook for: what a server returns beside answers, scores of prompts."""

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from deepinfer_plugin import nesting_middleware, provenance_endpoint, witness
from deepinfer_plugin.platforms.served import serves_our_model, use_our_worker
from deepinfer_plugin.sampling import seed_middleware

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
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply vLLM's CUDA settings, then put our worker in the place of the stock one where our model is served."""
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if serves_our_model(vllm_config) and parallel.worker_cls == STOCK_WORKER_CLASS:
            use_our_worker(vllm_config, WORKER_CLASS)
        if serves_our_model(vllm_config):
            parallel.disable_custom_all_reduce = True  # no sum of our model crosses ranks
