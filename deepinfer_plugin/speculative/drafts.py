"""Drafts in the rows of a step: which ids the model may read, and which drafts stand. Loads no vLLM."""

from __future__ import annotations

import torch


def mend_drafts(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Replace ids that no token has by 0, in place, before the model reads them; a drafter may make any.

    The draft that is verified is the id that the model has read, so nothing else has to know.

    Args:
        input_ids: [num_tokens], of a step.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
    """
    input_ids.masked_fill_((input_ids < 0) | (input_ids >= vocab_size), 0)


def accepted_prefix(
    sampled: torch.Tensor,
    read: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_columns: int,
    invalid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each request, and how many of them stand.

    Args:
        sampled: [num_rows] int64, the token that each row draws.
        read: [num_rows], the id that each row has read: of the first row of a request the last token, then drafts.
        cu_num_logits: [num_reqs + 1] int32, first row of each request; read on the device, where a schedule may have
            changed it.
        num_columns: most rows of a request.
        invalid: [num_rows] bool, rows whose draft may not be kept; None: none.

    Returns:
        [num_reqs, num_columns] int64, the draws of its rows (0 behind them), and [num_reqs] int32, 1 plus the drafts
        before the first that differs from the draw before it.

    Invariance: integers; a request's result follows from its own rows.
    """
    column = torch.arange(num_columns, device=sampled.device)
    rows = cu_num_logits[:-1, None].long() + column  # [num_reqs, num_columns]
    last = sampled.shape[0] - 1
    tokens = torch.where(rows < cu_num_logits[1:, None], sampled[rows.clamp(max=last)], 0)
    after = (rows + 1).clamp(max=last)
    is_kept = (rows + 1 < cu_num_logits[1:, None]) & (read[after] == tokens)
    if invalid is not None:
        is_kept = is_kept & ~invalid[after]
    num_mismatches = (~is_kept).long().cumsum(dim=1)
    num_kept = (num_mismatches == 0).long().cumsum(dim=1)[:, -1]  # a sum would be launched by the number of requests
    return tokens, (1 + num_kept).int()
