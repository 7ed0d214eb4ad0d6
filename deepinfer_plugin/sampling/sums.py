"""The way of ``sum_smaller_probs`` from the sampler to the answer: one more column of vLLM's log-probabilities.

vLLM has no other channel from a sampler to its front end. The column has the id -1, which no token has. The front end
takes it out of every answer of the step before vLLM reads it, and hands it to the answers whose request asked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.sampling.extras import SUM_SMALLER

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams

COLUMN_ID = -1

# While an HTTP request is handled: the sums of its prompts by vLLM's request id, read by the middleware.
SUMS_OF_RESPONSE: ContextVar[dict[str, list[float]] | None] = ContextVar("deepinfer_sums_of_response", default=None)


def has_carrier(params: SamplingParams) -> bool:
    """Whether the answer can carry sums: the events of a server's stream are written before the sums are known."""
    from vllm.sampling_params import RequestOutputKind

    return SUMS_OF_RESPONSE.get() is None or params.output_kind != RequestOutputKind.DELTA


def require_carrier(params: SamplingParams) -> None:
    """Refuse a stream of the server that asks for sums.

    Raises:
        VLLMValidationError: the request asks for sums and for a stream.
    """
    from vllm.exceptions import VLLMValidationError

    if (params.extra_args or {}).get(SUM_SMALLER) and not has_carrier(params):
        raise VLLMValidationError(
            f"sampling: {SUM_SMALLER} is set with stream, expected one of the two; ask without stream",
            parameter="extra_args",
        )


def with_column(scores: Any, sums: torch.Tensor) -> Any:
    """vLLM's ``LogprobsTensors`` with the sums as its last column.

    Args:
        scores: ids and log-probabilities [num_rows, num_columns].
        sums: [num_rows] fp32.
    """
    import torch

    ids = scores.logprob_token_ids
    return scores._replace(
        logprob_token_ids=torch.cat((ids, torch.full_like(ids[:, :1], COLUMN_ID)), dim=1),
        logprobs=torch.cat((scores.logprobs, sums[:, None]), dim=1),
    )


def take_column(original: Callable[..., Any], self: Any, scores: Any) -> Any:
    """Around ``LogprobsProcessor._update_sample_logprobs``: collects the column and hides it from vLLM."""
    ids = scores.logprob_token_ids
    if ids.shape[0] > 0 and int(ids[0, -1]) == COLUMN_ID:
        taken = getattr(self, "deepinfer_sums", [])
        self.deepinfer_sums = [*taken, *scores.logprobs[:, -1].tolist()]
        scores = scores._replace(logprob_token_ids=ids[:, :-1], logprobs=scores.logprobs[:, :-1])
    return original(self, scores)


def sums_of(state: Any) -> list[float] | None:
    """The sums of an answer so far, one per token; None where its request did not ask."""
    if not state.deepinfer_wants_sums:
        return None
    return list(getattr(state.logprobs_processor, "deepinfer_sums", []))
