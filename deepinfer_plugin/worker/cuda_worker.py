"""vLLM's CUDA worker, with what vLLM has no other hook for."""

from vllm.v1.worker.gpu_worker import Worker

from deepinfer_plugin.worker import loading as loading  # registers our load format
from deepinfer_plugin.worker.balanced_experts import BalancedExperts
from deepinfer_plugin.worker.own_prompt_scores import OwnPromptScores
from deepinfer_plugin.worker.scheduled_verification import ScheduledVerification


class DeepInferCudaWorker(BalancedExperts, OwnPromptScores, ScheduledVerification, Worker):
    """Scores prompts of our model as its sampler scores tokens; everything else is vLLM's."""
