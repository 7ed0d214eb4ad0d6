"""Slots of window rows and of compressed entries in plain PyTorch."""

import torch


def make_inputs(
    num_tokens: int, num_reqs: int, max_blocks: int, block_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random (positions, req_idx, block_table); every page id occurs once."""
    positions = torch.randint(0, max_blocks * block_size, (num_tokens,), generator=generator)
    req_idx = torch.randint(0, num_reqs, (num_tokens,), generator=generator, dtype=torch.int32)
    block_table = torch.randperm(num_reqs * max_blocks, generator=generator).view(num_reqs, max_blocks)
    return positions.to(device), req_idx.to(device), block_table.to(torch.int32).to(device)


def window_slots_reference(
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window: int,
    floor: torch.Tensor,
) -> torch.Tensor:
    """``window_slots`` on checked arguments."""
    last = positions.unsqueeze(1)  # [num_tokens, 1]
    first = torch.maximum(positions - (window - 1), floor).clamp_(min=0).unsqueeze(1)
    visible = first + torch.arange(window, device=positions.device)  # [num_tokens, window]
    is_none = (visible > last) | (req_idx < 0).unsqueeze(1)
    return _slots(visible, is_none, req_idx, block_table, block_size)


def entry_slots_reference(
    indices: torch.Tensor, req_idx: torch.Tensor, block_table: torch.Tensor, entries_per_block: int
) -> torch.Tensor:
    """``entry_slots`` on checked arguments."""
    is_none = (indices < 0) | (req_idx < 0).unsqueeze(1)
    return _slots(indices.long(), is_none, req_idx, block_table, entries_per_block)


def _slots(
    entries: torch.Tensor, is_none: torch.Tensor, req_idx: torch.Tensor, block_table: torch.Tensor, per_block: int
) -> torch.Tensor:
    """Slot of each entry [num_tokens, K] of its request, -1 where ``is_none``."""
    entries = entries.masked_fill(is_none, 0)
    page = entries // per_block
    block = block_table[req_idx.clamp(min=0).unsqueeze(1), page]
    return (entries + (block - page) * per_block).masked_fill_(is_none, -1)
