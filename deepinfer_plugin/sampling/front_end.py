"""The seed of every drawn answer: taken from the request or drawn here, in the front end, and handed back.

Beside it the answer says with which bounded replay its prompt was computed, and what else its request asks for.

vLLM has no hook that may change a request's parameters before the engine, or add to its result, so two of its methods
are wrapped (``compat.PATCHES``). Only requests of our model are touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.grammar.so_args import settle_structured_output
from deepinfer_plugin.replay.requests import describe
from deepinfer_plugin.sampling.extras import SUM_SMALLER, capped_max_tokens, settle_extras
from deepinfer_plugin.sampling.room import require_room
from deepinfer_plugin.sampling.seeds import SEED_MODULUS, as_int64
from deepinfer_plugin.sampling.server_defaults import server_defaults
from deepinfer_plugin.sampling.sums import SUMS_OF_RESPONSE, require_carrier, sums_of, take_column
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative.facts import expect_facts, facts_of, take_columns
from deepinfer_plugin.wrapping import wrap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

ALIAS = "seq_seed"  # DeepInfer's name of the seed, in extra_args or vllm_xargs
DRAWN_BITS = 53  # a drawn seed survives JSON readers that keep numbers as doubles
MODEL_TYPE = "deepseek_v41"

# While an HTTP request is handled: the seeds of its prompts by vLLM's request id, filled here, read by the middleware.
SEEDS_OF_RESPONSE: ContextVar[dict[str, int] | None] = ContextVar("deepinfer_seeds_of_response", default=None)


def settle_seed(params: SamplingParams) -> SamplingParams:
    """Give the parameters of a request the seed that it is drawn with.

    The seed is ``seed``, or else ``extra_args["seq_seed"]``, modulo 2^64, or else drawn. A greedy request needs none.

    Args:
        params: the caller's; not changed, because callers share one object between prompts.

    Returns:
        A copy: seed 0 to 2^64 - 1, no ``seq_seed``. Sample i of ``n`` is drawn with seed + i, as vLLM has it.

    Raises:
        VLLMValidationError: a malformed ``seq_seed``, two seeds that differ, or a sample whose seed has over 64 bits.
    """
    settled = copy(params)
    alias = None
    if params.extra_args and ALIAS in params.extra_args:
        alias = _parse_alias(params.extra_args[ALIAS])
        settled.extra_args = {key: value for key, value in params.extra_args.items() if key != ALIAS} or None
    seed = None if params.seed is None else params.seed % SEED_MODULUS
    if seed is not None and alias is not None and seed != alias:
        raise _error(ALIAS, f"{alias} modulo 2^64", f"the value of seed, {seed} modulo 2^64; pass one of the two")
    seed = alias if seed is None else seed
    if seed is None and params.temperature > 0.0:
        seed = secrets.randbits(DRAWN_BITS)
    if seed is not None and seed + params.n > SEED_MODULUS:
        raise _error("seed", f"{seed} modulo 2^64 with n {params.n}", "seed + n at most 2^64; choose another seed")
    settled.seed = seed
    return settled


def reported_seed(seed: int | None) -> int | None:
    """The seed as a client can send it back: a signed 64-bit number.

    vLLM takes -1 for none, so 2^64 - 1 stays unsigned: ``seq_seed`` takes it, and ``seed`` refuses it.
    """
    return seed if seed is None or seed == SEED_MODULUS - 1 else as_int64(seed)


def _parse_alias(value: object) -> int:
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, int) and not isinstance(value, bool):
        return value % SEED_MODULUS
    if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) <= 40:
        return int(text) % SEED_MODULUS
    raise _error(ALIAS, repr(value), "an integer, taken modulo 2^64; correct it or leave it out")


def _error(parameter: str, found: str, expected: str) -> Exception:
    """vLLM's error for a bad parameter, which its server answers with status 400."""
    from vllm.exceptions import VLLMValidationError

    text = f"sampling: {parameter} is {found}, expected {expected}"
    error: Exception = VLLMValidationError(text, parameter=parameter)
    return error


def install() -> None:
    """Wrap vLLM's methods in this process, once.

    Raises:
        PlatformError: a method is not the one this version knows.
    """
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

    wrap(InputProcessor, "process_inputs", ("self", "request_id", "prompt", "params"), _process_inputs)
    wrap(
        RequestState,
        "from_new_request",
        ("cls", "tokenizer", "request", "prompt", "parent_req"),
        _from_new_request,
    )
    wrap(LogprobsProcessor, "_update_sample_logprobs", ("self", "logprobs_lists"), _update_sample_logprobs)
    wrap(RequestState, "_new_request_output", ("self", "external_req_id", "outputs", "finished"), _new_request_output)


def is_ours(model_config: Any, params: Any) -> bool:
    """Whether a request asks our model for text."""
    from vllm.sampling_params import SamplingParams

    return isinstance(params, SamplingParams) and model_config.hf_config.model_type == MODEL_TYPE


def _process_inputs(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    from deepinfer_plugin.grammar.admission import admit_constraint

    if not is_ours(self.model_config, params):
        return original(self, request_id, prompt, params, *args, **kwargs)
    vocab_size = self.model_config.get_vocab_size()
    defaults = server_defaults(Settings.from_envs(), params)
    settled = settle_structured_output(settle_seed(params), vocab_size)
    settled, extras = settle_extras(settled, vocab_size, defaults)
    require_carrier(settled)
    admit_constraint(self.model_config, self.tokenizer, settled)
    request = original(self, request_id, prompt, settled, *args, **kwargs)
    own = request.sampling_params  # a copy that is the engine's
    require_room(own)
    own.max_tokens = capped_max_tokens(extras, len(request.prompt_token_ids or ()), own.max_tokens)
    seeds, seed = SEEDS_OF_RESPONSE.get(), reported_seed(settled.seed)
    if seeds is not None and seed is not None:
        seeds[request_id] = seed
    return request


def _from_new_request(
    original: Callable[..., Any],
    cls: Any,
    tokenizer: Any,
    request: Any,
    prompt: Any,
    parent_req: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    state = original(cls, tokenizer, request, prompt, parent_req, *args, **kwargs)
    params = request.sampling_params if parent_req is None else parent_req.sampling_params
    state.deepinfer_seed = None if params is None else reported_seed(params.seed)
    state.deepinfer_wants_sums = bool(((params and params.extra_args) or {}).get(SUM_SMALLER))
    state.deepinfer_sums_of_response = SUMS_OF_RESPONSE.get()  # outputs are made in another task
    expect_facts(state, params, state.external_req_id)
    state.deepinfer_replay = describe(
        Settings.from_envs().replay, len(request.prompt_token_ids or ()), request.sampling_params
    )
    return state


def _update_sample_logprobs(original: Callable[..., Any], self: Any, scores: Any) -> Any:
    return take_column(original, self, take_columns(self, scores))


def _new_request_output(
    original: Callable[..., Any], self: Any, external_req_id: str, *args: Any, **kwargs: Any
) -> Any:
    output = original(self, external_req_id, *args, **kwargs)
    output.seed, output.replay = self.deepinfer_seed, self.deepinfer_replay
    output.sum_smaller_probs, output.draft_facts = sums_of(self), facts_of(self)
    if output.sum_smaller_probs is not None and self.deepinfer_sums_of_response is not None:
        self.deepinfer_sums_of_response[external_req_id] = output.sum_smaller_probs
    return output
