"""What a request asks of bounded replay, and what an answer says about it. Loads neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_plugin.replay.settings import ReplaySettings

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def needs_every_row(params: SamplingParams | None) -> bool:
    """Whether a request asks for something of every prompt row, and is computed without decoder replay."""
    return params is not None and (params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None)


def describe(settings: ReplaySettings, num_prompt: int, params: SamplingParams | None) -> dict[str, str | int | bool]:
    """The replay of one request, for the provenance of its answer: all that it depends on, and nothing else.

    Args:
        settings: of the engine.
        num_prompt: tokens of its prompt.
        params: what it asked for.

    Returns:
        ``decoder``: mode in force, ``off`` where every row was computed. ``reason``: why that is not the engine's
        mode, "" if it is. ``keep_tokens`` and ``first_decoder_row``: K and s of the answer's function; 0 without
        decoder replay. ``encoder``: policy after a prefix hit. ``is_approximate``: whether the bits may depend on the
        length of a hit.
    """
    is_unreplayed = settings.is_on and needs_every_row(params)
    is_cut = settings.is_on and not is_unreplayed
    return {
        "decoder": settings.mode.value if is_cut else "off",
        "reason": "prompt log-probabilities need every row" if is_unreplayed else "",
        "keep_tokens": settings.keep_tokens if is_cut else 0,
        "first_decoder_row": max(0, num_prompt - settings.keep_tokens) if is_cut else 0,
        "encoder": str(settings.encoder),
        "is_approximate": settings.is_approximate,
    }
