"""Whether a configuration of vLLM is that of our model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def serves_our_model(vllm_config: "VllmConfig") -> bool:
    """True where the model has our architecture; False also while vLLM has no model configuration yet."""
    model_config = vllm_config.model_config
    return model_config is not None and getattr(model_config.hf_config, "model_type", "") == "deepseek_v41"
