"""vLLM's CUDA worker, with what vLLM has no other hook for."""

from vllm.v1.worker.gpu_worker import Worker

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.platforms.served import serves_our_model
from deepinfer_plugin.worker import loading as loading  # registers our load format
from deepinfer_plugin.worker.balanced_experts import BalancedExperts
from deepinfer_plugin.worker.own_prompt_scores import OwnPromptScores
from deepinfer_plugin.worker.scheduled_verification import ScheduledVerification

DISCARDS = 2
"""Sleep level at which vLLM throws weights away instead of moving them to the host."""


class DeepInferCudaWorker(BalancedExperts, OwnPromptScores, ScheduledVerification, Worker):
    """Scores prompts of our model as its sampler scores tokens; everything else is vLLM's."""

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the GPU for a while.

        Args:
            level: 1 keeps weights and what was made beside them on the host.

        Raises:
            ConfigError: level 2, which loses state of the sampler and of bounded replay that no weight file holds.
        """
        if level == DISCARDS and serves_our_model(self.vllm_config):
            raise ConfigError(
                f"sleep: level is {level}, expected 1; level {DISCARDS} discards state of the sampler and of bounded "
                "replay that loading weights does not bring back, and answers would change; use level 1"
            )
        super().sleep(level)
