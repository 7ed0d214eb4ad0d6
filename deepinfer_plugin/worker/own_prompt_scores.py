"""What every worker of ours adds to vLLM's: prompts of our model are scored in the arithmetic of its sampler."""

from typing import Any

from deepinfer_plugin.worker.model_state import DeepInferModelState


class OwnPromptScores:
    """Stands before a worker class of vLLM in the bases; no hook of the model state reaches the runner's scorer."""

    model_runner: Any

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, then take over the states of the object that scores prompts."""
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        stock = self.model_runner.prompt_logprobs_worker
        # stages of a pipeline before the last score nothing
        if isinstance(self.model_runner.model_state, DeepInferModelState) and stock is not None:
            from deepinfer_plugin.sampling.prompt_logprobs import PromptLogprobs

            self.model_runner.prompt_logprobs_worker = PromptLogprobs.adopt(stock)
