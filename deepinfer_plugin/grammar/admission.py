"""Where requests meet the gate: before vLLM's own validation, and off the server's event loop."""

from __future__ import annotations

import asyncio
import atexit
import functools
from collections.abc import Callable
from typing import Any

from deepinfer_plugin import variables
from deepinfer_plugin.grammar.gate import GrammarError, GrammarGate, constraint_of
from deepinfer_plugin.grammar.so_args import settle_structured_output
from deepinfer_plugin.sampling import front_end
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.wrapping import wrap


def install() -> None:
    """Wrap the server's way into the engine in this process, once, see ``compat.PATCHES``.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(AsyncLLM, "add_request", ("self", "request_id", "prompt", "params"), _add_request)


def admit_constraint(model_config: Any, tokenizer: Any, params: Any) -> None:
    """Refuse a request whose constraint does not compile within the limits. May take their time.

    Args:
        model_config: vLLM's ``ModelConfig``.
        tokenizer: vLLM's tokenizer of the model.
        params: ``SamplingParams`` without ``so_args``; not changed.

    Raises:
        VLLMValidationError: it does not compile.
    """
    from vllm.exceptions import VLLMValidationError

    if params.structured_outputs is None or tokenizer is None:
        return  # without a tokenizer vLLM refuses it
    try:
        constraint = constraint_of(params.structured_outputs)
        if constraint is not None:
            _gate(tokenizer, model_config.get_vocab_size()).check(*constraint)
    except GrammarError as error:
        raise VLLMValidationError(str(error), parameter="structured_outputs") from None


@functools.cache
def _gate(tokenizer: Any, vocab_size: int) -> GrammarGate:
    def describe() -> str:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        return str(info.serialize_json())

    gate = GrammarGate(describe, timeout_s=float(Settings.from_envs()[variables.XGRAMMAR_TIMEOUT]))
    atexit.register(gate.close)
    return gate


async def _add_request(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if front_end.is_ours(self.model_config, params):
        settled = settle_structured_output(params, self.model_config.get_vocab_size())
        if settled.structured_outputs is not None:
            await asyncio.to_thread(admit_constraint, self.model_config, self.input_processor.tokenizer, settled)
    return await original(self, request_id, prompt, params, *args, **kwargs)
