"""Lists of a request for which a worker has room of a fixed size; one that is longer is refused in front of the engine.

vLLM refuses it only in the worker, and an error there ends the engine with every request that it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def require_room(params: SamplingParams) -> None:
    """Refuse lists that a worker has no room for.

    Args:
        params: as the engine gets them, with the ids of its stop tokens and bad words filled in.

    Raises:
        VLLMValidationError: names the list, its length and the most that there is room for.
    """
    from vllm import envs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias

    words = params.bad_words_token_ids or []
    stops = params.all_stop_token_ids if params.min_tokens > 0 else ()
    lists = (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS, "ids"),
        ("logit_bias", len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS, "ids"),
        (
            "stop_token_ids",
            len(stops),
            logit_bias.MAX_NUM_STOP_TOKEN_IDS,
            "ids, ends of sequence included, with min_tokens",
        ),
        ("bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS, "words, counting spellings"),
        ("bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, "tokens in all"),
    )
    for name, count, most, unit in lists:
        if count > most:
            text = f"sampling: {name} has {count} {unit}, expected at most {most}; shorten it"
            raise VLLMValidationError(text, parameter=name)
