"""Predecessors of the rows of a step in plain PyTorch."""

import torch


def make_inputs(
    lengths: list[int], contexts: list[int], num_padding: int, max_model_len: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A random step on the CPU, all arguments of ``lookback_ids`` but ``out``; its requests lie anywhere in the table.

    Args:
        lengths: rows of each request in the step.
        contexts: position of the first row of each request.
        num_padding: rows behind the last request, with positions left over from other batches.
        max_model_len: columns of the history.
        generator: of the ids.
    """
    num_reqs, num_rows = len(lengths), sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    request = torch.repeat_interleave(torch.arange(num_reqs), torch.tensor(lengths))
    positions = torch.tensor(contexts)[request] + torch.arange(num_rows) - starts[request]
    stale = torch.randint(-1, 2 * max_model_len, (num_padding,), generator=generator)
    ids = torch.randint(0, 1 << 17, (num_rows + num_padding,), generator=generator, dtype=torch.int32)
    history = torch.randint(0, 1 << 17, (num_reqs + 2, max_model_len), generator=generator, dtype=torch.int32)
    return {
        "input_ids": ids,
        "positions": torch.cat((positions, stale)),
        "query_start_loc": starts.int(),
        "idx_mapping": torch.randperm(num_reqs + 2, generator=generator)[:num_reqs],
        "all_token_ids": history,
    }


def lookback_ids_reference(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """``lookback_ids`` on checked arguments."""
    num_tokens, depth = out.shape
    num_reqs = idx_mapping.shape[0]
    rows = torch.arange(num_tokens, device=out.device)
    ends = query_start_loc[1 : num_reqs + 1].contiguous()
    req_idx = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp_max_(num_reqs - 1)
    shift = torch.arange(1, depth + 1, device=out.device)
    position = positions[:, None] - shift  # [num_tokens, depth]
    row = rows[:, None] - shift
    in_step = row >= query_start_loc[req_idx].long()[:, None]
    from_step = input_ids[row.clamp_min(0)].long()
    history_rows = idx_mapping[req_idx].long()[:, None]
    from_history = all_token_ids[history_rows, position.clamp(0, all_token_ids.shape[1] - 1)].long()
    return out.copy_(torch.where(position < 0, -1, torch.where(in_step, from_step, from_history)))
