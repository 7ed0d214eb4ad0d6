"""Selections by (score descending, index ascending) in plain PyTorch."""

import torch
from torch.nn.functional import pad

_NEVER = -(1 << 63)  # below the key of every score


def make_inputs(num_tokens: int, num_entries: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Scores with many ties, both zeros, and -inf from a random visible length on: [num_tokens, num_entries] fp32."""
    scores = torch.randint(-4, 5, (num_tokens, num_entries), generator=generator) / 4
    is_negative_zero = (scores == 0) & (torch.rand(num_tokens, num_entries, generator=generator) < 0.5)
    scores = torch.where(is_negative_zero, torch.tensor(-0.0), scores)
    num_visible = torch.randint(0, num_entries + 1, (num_tokens, 1), generator=generator)
    return scores.masked_fill(torch.arange(num_entries) >= num_visible, -torch.inf).to(device)


def topk_indices_reference(scores: torch.Tensor, k: int, num_visible: torch.Tensor | None = None) -> torch.Tensor:
    """``topk_indices`` on checked arguments."""
    num_tokens, num_entries = scores.shape
    if num_visible is not None:
        is_hidden = torch.arange(num_entries, device=scores.device) >= num_visible[:, None]
        scores = scores.masked_fill(is_hidden, -torch.inf)
    chosen = torch.full((num_tokens, k), -1, dtype=torch.int32, device=scores.device)
    num_chosen = min(k, num_entries)
    if num_tokens == 0 or num_chosen == 0:
        return chosen
    # One integer per entry that orders as (score, -index): all differ, so that any top-k algorithm finds one set.
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes both zeros equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) + torch.arange(num_entries - 1, -1, -1, device=scores.device)
    keys.masked_fill_(~(scores > -torch.inf), _NEVER)
    best, index = torch.topk(keys, num_chosen, dim=1, sorted=False)
    index = index.masked_fill_(best == _NEVER, num_entries).sort(dim=1).values
    chosen[:, :num_chosen] = index.masked_fill_(index == num_entries, -1)
    return chosen


def candidate_blocks_reference(
    scores: torch.Tensor, num_visible: torch.Tensor, num_blocks: int, block_size: int
) -> torch.Tensor:
    """``candidate_blocks`` on checked arguments."""
    num_tokens, num_entries = scores.shape
    num_score_blocks = -(-num_entries // block_size)
    is_hidden = torch.arange(num_entries, device=scores.device) >= num_visible[:, None]
    scores = scores.masked_fill(is_hidden, -torch.inf)
    padded = pad(scores, (0, num_score_blocks * block_size - num_entries), value=-torch.inf)
    block_scores = padded.view(num_tokens, num_score_blocks, block_size).amax(dim=2)
    newest = torch.where(num_visible > 0, (num_visible - 1) // block_size, -1).unsqueeze(1)
    block_scores.masked_fill_(torch.arange(num_score_blocks, device=scores.device) == newest, torch.inf)
    return topk_indices_reference(block_scores, num_blocks)


def mask_to_candidates_reference(scores: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """``mask_to_candidates`` on checked arguments."""
    num_tokens, num_entries = scores.shape
    num_score_blocks = -(-num_entries // block_size)
    is_candidate = torch.zeros((num_tokens, num_score_blocks + 1), dtype=torch.bool, device=scores.device)
    # The column past the end takes the unused places of the list, and blocks past the last entry.
    column = blocks.long().masked_fill_(blocks < 0, num_score_blocks).clamp_(max=num_score_blocks)
    is_candidate.scatter_(1, column, True)
    is_candidate = is_candidate[:, :num_score_blocks].repeat_interleave(block_size, dim=1)[:, :num_entries]
    return scores.masked_fill(~is_candidate, -torch.inf)
