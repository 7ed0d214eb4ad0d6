"""Places of experts in plain PyTorch."""

import torch


def make_inputs(
    num_rows: int, top_k: int, num_experts: int, num_slots: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random topk_idx, table, num_replicas, is_real; the last third of the rows is not real, no unused entry is valid.

    Every expert is in one of the ``num_slots`` slots at least.
    """
    scores = torch.rand(num_rows, num_experts, generator=generator)
    topk_idx = scores.topk(top_k, dim=1).indices.sort(dim=1).values.to(torch.int32)
    extra = torch.randint(0, num_experts, (num_slots - num_experts,), generator=generator)
    experts = torch.cat([torch.arange(num_experts), extra])[torch.randperm(num_slots, generator=generator)]
    table = torch.full((num_experts, num_slots - num_experts + 1), -99, dtype=torch.int32)
    for expert in range(num_experts):
        slots = (experts == expert).nonzero()[:, 0]
        table[expert, : len(slots)] = slots.to(torch.int32)
    num_replicas = experts.bincount(minlength=num_experts).to(torch.int32)
    is_real = torch.ones(num_rows, top_k, dtype=torch.int32)
    is_real[num_rows - num_rows // 3 :] = 0
    return topk_idx.to(device), table.to(device), num_replicas.to(device), is_real.to(device)


def expert_places_reference(
    topk_idx: torch.Tensor,
    slots_per_rank: int,
    rank: int,
    table: torch.Tensor | None,
    num_replicas: torch.Tensor | None,
    is_real: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``expert_places`` on checked arguments."""
    slots, is_none = topk_idx, topk_idx < 0
    if table is not None and num_replicas is not None:
        ids = topk_idx.clamp(min=0).long()
        rows = torch.arange(ids.shape[0], device=ids.device)
        slots = table[ids, rows[:, None] % num_replicas[ids]]
    slots = slots.masked_fill(is_none, -1)
    if is_real is not None and counts is not None:
        is_counted = is_real[: slots.shape[0]]
        counted = slots[: is_counted.shape[0]]
        is_counted = is_counted.masked_fill(counted < 0, 0)
        counts.scatter_add_(0, counted.clamp(min=0).long().flatten(), is_counted.flatten())
    here = slots - rank * slots_per_rank
    here = here.masked_fill((here < 0) | (here >= slots_per_rank), -1)
    return slots, here, slots // slots_per_rank
