"""Log-probabilities of sampled tokens: one arithmetic, whatever the row's neighbours ask for."""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors

from deepinfer_kernels.log_softmax import token_log_softmax
from deepinfer_kernels.sample_tokens import top_tokens

LOGITS_MODES = ("raw_logits", "processed_logits")  # of --logprobs-mode: return logits, not their log-softmax


def score_rows(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    is_logits: bool,
    custom: tuple[torch.Tensor, torch.Tensor] | None = None,
    cu_num_logits: list[int] | torch.Tensor | None = None,
) -> LogprobsTensors:
    """Score one token per row and the best tokens, or the ids that the row's request names instead of these.

    Args:
        logits: [num_rows, vocab_size] fp32.
        token_ids: [num_rows] int64, the token of each row.
        num_top: how many best tokens; a row that wants fewer takes the first columns.
        is_logits: return the logits themselves instead of log-probabilities.
        custom: per row the number of ids its request names, [num_rows], 0 for none, and the ids, [num_rows, N] int64.
        cu_num_logits: first row of each request where a request has several rows.

    Returns:
        ids and scores [num_rows, 1 + max(num_top, N)]: the row's token, then the others, -inf where a row has fewer;
        and the rank of the row's token among the logits, 1 for the largest.

    Invariance: bitwise per row; ties between best tokens go to the lower id, so a longer list begins with the shorter.
    """
    ids = torch.cat((token_ids[:, None], top_tokens(logits, num_top)), dim=1)
    missing = None
    if custom is not None:
        ids, missing = _with_custom_ids(ids, *custom)
    scores = logits.gather(1, ids) if is_logits else token_log_softmax(logits, ids)
    if missing is not None:
        scores = scores.masked_fill(missing, -torch.inf)
    return LogprobsTensors(
        logprob_token_ids=ids,
        logprobs=scores,
        selected_token_ranks=(logits >= logits.gather(1, token_ids[:, None])).sum(dim=1),
        cu_num_generated_tokens=cu_num_logits,
    )


def _with_custom_ids(
    ids: torch.Tensor, num_custom: torch.Tensor, custom_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the named ids in the place of the best tokens, in the rows that have some: ids, and where there is none."""
    num_rows, num_top, num_named = ids.shape[0], ids.shape[1] - 1, custom_ids.shape[1]
    column = torch.arange(max(num_top, num_named), device=ids.device)
    top = torch.nn.functional.pad(ids[:, 1:], (0, column.shape[0] - num_top))
    named = torch.nn.functional.pad(custom_ids, (0, column.shape[0] - num_named))
    has_named = num_custom[:, None] > 0
    is_missing = column >= torch.where(has_named, num_custom[:, None], num_top)
    others = torch.where(has_named, named, top).masked_fill(is_missing, 0)
    never = torch.zeros((num_rows, 1), dtype=torch.bool, device=ids.device)
    return torch.cat((ids[:, :1], others), dim=1), torch.cat((never, is_missing), dim=1)
