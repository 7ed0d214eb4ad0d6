"""vLLM's CPU worker on a wheel whose compiled CPU extension cannot load."""

import gc

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from deepinfer_plugin.worker import loading as loading  # registers our load format
from deepinfer_plugin.worker.balanced_experts import BalancedExperts
from deepinfer_plugin.worker.own_prompt_scores import OwnPromptScores
from deepinfer_plugin.worker.scheduled_verification import ScheduledVerification

# kept alive for the life of the process: a torch.library fragment is undone when it is collected
_FRAGMENT = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define_missing_ops() -> None:
    """Define the op that ``CPUWorker.__init__`` calls and only vLLM's CPU build compiles.

    It binds memory to a NUMA node; leaving the placement to Linux changes no result.
    """
    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        _FRAGMENT.define("init_cpu_memory_env(int[] nodes) -> ()")  # type: ignore[no-untyped-call]
        _FRAGMENT.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class DeepInferCpuWorker(BalancedExperts, OwnPromptScores, ScheduledVerification, CPUWorker):
    """One process, one thread: a product of matrices keeps its order whatever else runs on the host."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        _define_missing_ops()
        torch.set_num_threads(1)
        # vLLM gives every replica a NUMA node of its own; a worker of ours is bound to none, and a host may have one
        vllm_config.parallel_config.assigned_physical_gpu_ids = None
        gc.freeze()  # vLLM collects garbage around every memory reading: half a second each over the imported modules
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)
