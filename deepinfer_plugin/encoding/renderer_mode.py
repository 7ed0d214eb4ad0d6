"""The tokenizer mode under which vLLM finds our renderer. Loads the renderer itself only where a mode is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig

TOKENIZER_MODE = "deepinfer_v41"
VLLM_TOKENIZER_MODE = "deepseek_v41"  # what vLLM chooses for the architecture

logger = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Make the mode known to vLLM, in each process that loads the tokenizer."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.deepseek_v41", "DeepseekV41Tokenizer")
        RENDERER_REGISTRY.register(TOKENIZER_MODE, "deepinfer_plugin.encoding.renderer", "DeepInferRenderer")


def choose(model_config: ModelConfig) -> None:
    """Put our mode in the place of vLLM's own for this model; another mode of the user stays, with a warning."""
    if model_config.tokenizer_mode == VLLM_TOKENIZER_MODE:
        model_config.tokenizer_mode = TOKENIZER_MODE
    elif model_config.tokenizer_mode != TOKENIZER_MODE:
        logger.warning(
            "tokenizer_mode is %r, expected auto: with it, text of a user that spells a control token becomes that "
            "token; leave --tokenizer-mode out",
            model_config.tokenizer_mode,
        )
