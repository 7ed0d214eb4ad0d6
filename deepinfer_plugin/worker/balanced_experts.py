"""What every worker of ours adds to vLLM's: our balancing of experts where vLLM has its own."""

from typing import Any

from deepinfer_plugin.eplb.controller import ExpertBalancing
from deepinfer_plugin.platforms.served import serves_our_model


class BalancedExperts:
    """Stands before a worker class of vLLM in the bases; the runner takes its controller from no configuration."""

    vllm_config: Any
    model_runner: Any
    device: Any

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Put the controller in, then load: the runner hands it the model."""
        if serves_our_model(self.vllm_config):
            self.model_runner.eplb = ExpertBalancing(self.vllm_config.parallel_config, self.device)
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
