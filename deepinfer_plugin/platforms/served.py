"""Whether a configuration of vLLM is that of our model, and what it then uses in the place of vLLM's own."""

from typing import TYPE_CHECKING

from deepinfer_plugin.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOAD_FORMAT = "deepinfer"
"""Name of our reader of checkpoints (worker/loading.py), known where one of our workers is."""

_READ_BY_US = ("auto", "hf", "safetensors")


def serves_our_model(vllm_config: "VllmConfig") -> bool:
    """True where the model has our architecture and we serve it; False while vLLM has no model configuration yet."""
    model_config = vllm_config.model_config
    is_ours = model_config is not None and getattr(model_config.hf_config, "model_type", "") == "deepseek_v41"
    return is_ours and Settings.from_envs().batch_invariant


def use_our_worker(vllm_config: "VllmConfig", worker_class: str) -> None:
    """Take our worker, and with it our reader where vLLM would read safetensors files."""
    vllm_config.parallel_config.worker_cls = worker_class
    if serves_our_model(vllm_config) and vllm_config.load_config.load_format in _READ_BY_US:
        vllm_config.load_config.load_format = LOAD_FORMAT
