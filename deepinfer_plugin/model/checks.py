"""Checks in the front-end process, before an engine starts: configuration, checkpoint files, engine options."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig
from vllm.platforms import current_platform

from deepinfer_plugin import envs
from deepinfer_plugin.errors import ConfigError, SettingError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.graphs import graph_mode
from deepinfer_plugin.model.weights import check_checkpoint, check_tokenizer
from deepinfer_plugin.sampling import front_end
from deepinfer_plugin.worker import live_code

if TYPE_CHECKING:
    from vllm.config import ModelConfig as EngineModelConfig
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class DeepseekV41Checks(DeepseekV4ForCausalLMConfig):
    """vLLM's hook for the architecture: what vLLM does there, then our checks.

    Raises:
        SettingError: vLLM's own switch contradicts ours, or a variable asks for what is not built.
        ConfigError: config.json or an engine option is one that the model cannot serve.
        CheckpointError: a file of a local checkpoint is missing, damaged or contradicts another one.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "EngineModelConfig") -> None:
        refuse_unbuilt()
        device = "cuda" if current_platform.is_cuda() else "cpu"
        envs.pin_vllm_batch_invariance(device)
        envs.enter_batch_invariant_mode(device)
        config = ModelConfig.from_hf(model_config.hf_config)
        model_dir = Path(model_config.model)
        if model_dir.is_dir() and any(model_dir.glob("*.safetensors*")):  # none where only speed is measured
            check_tokenizer(model_dir, config)
            check_checkpoint(model_dir, config)
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        check_engine_options(vllm_config)
        if vllm_config.cache_config.swa_bounded_replay:
            vllm_config.cache_config.swa_bounded_replay = False
            logger.info("SWA bounded replay is off: window KV is cached with the prefix and a hit is exact")
        front_end.install()
        if not vllm_config.parallel_config.worker_extension_cls:  # a user's own, as reinforcement learning needs, stays
            vllm_config.parallel_config.worker_extension_cls = live_code.CLASS_PATH
        compilation = vllm_config.compilation_config
        has_graphs = current_platform.is_cuda() and not vllm_config.model_config.enforce_eager
        compilation.cudagraph_mode = graph_mode(compilation.cudagraph_mode, has_graphs=has_graphs)


def refuse_unbuilt() -> None:
    """Refuse variables that ask for a feature which the model does not have.

    Raises:
        SettingError: one sentence that names the first such variable and its feature.
    """
    refused = envs.refusals(envs.load(), is_our_model=True)
    if refused:
        raise SettingError(refused[0])


def check_engine_options(vllm_config: "VllmConfig") -> None:
    """Refuse what this version cannot serve, naming the option.

    Raises:
        ConfigError: a parallel size above 1, speculative decoding, LoRA, or an odd block size.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: {name} is {size}, expected 1; this version serves the model on one device"
            )
    for name, reason in (
        ("enable_eplb", "moving experts between devices is not part of the promise yet"),
        ("enable_dbo", "micro-batches of the Engram layers are not supported"),
    ):
        if getattr(parallel, name):
            raise ConfigError(f"DeepseekV41ForCausalLM: {name} is True, expected False; {reason}, leave the flag out")
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: speculative_config.method is {vllm_config.speculative_config.method!r}, expected "
            "none; this version has no draft model, leave --speculative-config out"
        )
    if vllm_config.lora_config is not None:
        raise ConfigError("DeepseekV41ForCausalLM: lora_config is set, expected none; leave --enable-lora out")
    if cache.user_specified_block_size and cache.block_size % 32 != 0:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: block_size is {cache.block_size}, expected a multiple of 32; "
            "leave --block-size out for the default"
        )
