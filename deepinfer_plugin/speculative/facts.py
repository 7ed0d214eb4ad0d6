"""The way of ``draft_facts`` from the worker to the answer: further columns of vLLM's log-probabilities.

A request asks with ``draft_facts`` in ``extra_args`` (``vllm_xargs`` of the server). Its answer then says of every
engine step that brought tokens:

* ``drafted``: drafts that the step had for the request,
* ``verified``: how many of them passed the model,
* ``accepted``: how many of these stand,
* ``confidence_score``: what the drafter said of each of them: its chance to be accepted if all before it are; empty
  where the drafter says nothing.

The step gave ``accepted + 1`` tokens; those of the last one behind the end of the answer are not in it. DeepInfer's
``draft_tok`` and ``accept_tok`` are ``verified + 1`` and ``accepted + 1``. Without drafts the list is empty.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.sampling.extras import DRAFT_FACTS

if TYPE_CHECKING:
    import torch

COLUMN_ID = -2
NUM_COUNTS = 3  # columns in front of the confidences

Facts = list[dict[str, Any]]

# While an HTTP request is handled: the growing facts of its prompts by vLLM's request id, read by the middleware.
FACTS_OF_RESPONSE: ContextVar[dict[str, Facts] | None] = ContextVar("deepinfer_facts_of_response", default=None)


def with_columns(scores: Any, facts: torch.Tensor, starts: torch.Tensor) -> Any:
    """vLLM's ``LogprobsTensors`` with the facts of its request behind every row.

    Args:
        scores: ids and log-probabilities [num_rows, num_columns].
        facts: [num_reqs, num_facts] fp32.
        starts: [num_reqs + 1] int32, first row of each request.
    """
    import torch

    ids = scores.logprob_token_ids
    rows = torch.arange(ids.shape[0], device=ids.device)
    request = torch.searchsorted(starts[1:].contiguous(), rows.to(starts.dtype), right=True)
    added = facts[request.clamp_max(facts.shape[0] - 1)]
    return scores._replace(
        logprob_token_ids=torch.cat((ids, ids.new_full(added.shape, COLUMN_ID)), dim=1),
        logprobs=torch.cat((scores.logprobs, added), dim=1),
    )


def take_columns(processor: Any, scores: Any) -> Any:
    """Take the facts of a step out of what a ``LogprobsProcessor`` gets, and keep them if its request asked."""
    ids = scores.logprob_token_ids
    num_facts = int((ids[0] == COLUMN_ID).sum()) if ids.shape[0] > 0 else 0
    if num_facts == 0:
        return scores
    kept = getattr(processor, "deepinfer_draft_facts", None)
    if kept is not None:
        values = scores.logprobs[0, -num_facts:].tolist()
        drafted, verified, accepted = (int(value) for value in values[:NUM_COUNTS])
        kept.append(
            {
                "drafted": drafted,
                "verified": verified,
                "accepted": accepted,
                "confidence_score": values[NUM_COUNTS:][:drafted],
            }
        )
    return scores._replace(logprob_token_ids=ids[:, :-num_facts], logprobs=scores.logprobs[:, :-num_facts])


def expect_facts(state: Any, params: Any, name: str) -> None:
    """Make room for the facts of an answer whose request asks for them.

    Args:
        state: vLLM's ``RequestState`` of the front end.
        params: sampling parameters of the request, or None.
        name: of the request, as the server knows it.
    """
    if not ((params and params.extra_args) or {}).get(DRAFT_FACTS):
        return
    state.logprobs_processor.deepinfer_draft_facts = []
    of_response = FACTS_OF_RESPONSE.get()
    if of_response is not None:
        of_response[name] = state.logprobs_processor.deepinfer_draft_facts


def facts_of(state: Any) -> Facts | None:
    """The facts of an answer so far, a list that grows with it; None where its request did not ask."""
    found: Facts | None = getattr(state.logprobs_processor, "deepinfer_draft_facts", None)
    return found
