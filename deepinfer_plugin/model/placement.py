"""Where the replicas of a layer's experts are, and how many rows each of them got."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class Placement:
    """Expert ids to slots, one of them per row. The tensors keep their addresses: a captured graph reads them.

    A slot is a place for the weights of one expert on one rank; all replicas of an expert hold the same bytes, so which
    of them a row takes changes no bit.

    Attributes:
        table: [num_experts, max_replicas] int32, the slot of every replica; entries that are not used are 0.
        num_replicas: [num_experts] int32.
    """

    def __init__(self, num_experts: int, num_slots: int) -> None:
        max_replicas = num_slots - num_experts + 1
        self.table = torch.zeros(num_experts, max_replicas, dtype=torch.int32)
        self.num_replicas = torch.ones(num_experts, dtype=torch.int32)
        self.set(tuple(slot % num_experts for slot in range(num_slots)))

    def set(self, experts: tuple[int, ...]) -> None:
        """Take another placement into force.

        Args:
            experts: the expert in each slot; every expert is in one at least.
        """
        table: list[list[int]] = [[] for _ in range(self.table.shape[0])]
        for slot, expert in enumerate(experts):
            table[expert].append(slot)
        width = self.table.shape[1]
        self.table.copy_(torch.tensor([slots + [0] * (width - len(slots)) for slots in table], device="cpu"))
        self.num_replicas.copy_(torch.tensor([len(slots) for slots in table], device="cpu"))


@dataclass(slots=True, kw_only=True)
class ExpertLoad:
    """Rows that every slot of every layer got in the present step, of this replica's own rows.

    Attributes:
        counts: [num_layers, num_slots] int32; ``expert_places`` adds to them.
        is_real: [max_num_rows, top_k] int32, 1 where a row is none that fills up a graph. Rows that bounded replay
            computes beyond ``max_num_rows`` are left out.
        has_prompt_rows: whether the step computes rows of a prompt.
    """

    counts: torch.Tensor
    is_real: torch.Tensor
    has_prompt_rows: bool = False

    @classmethod
    def empty(cls, num_layers: int, num_slots: int, max_num_rows: int, top_k: int) -> ExpertLoad:
        """All zero, on torch's default device."""
        return cls(
            counts=torch.zeros(num_layers, num_slots, dtype=torch.int32),
            is_real=torch.zeros(max_num_rows, top_k, dtype=torch.int32),
        )

    def begin(self, num_rows: int) -> None:
        """Forget the last step, before a forward pass of ``num_rows`` rows and those that fill up its graph."""
        self.counts.zero_()
        self.is_real[:num_rows] = 1
        self.is_real[num_rows:] = 0
