"""Where the replicas of a layer's experts are, and how many rows each of them got."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class Placement:
    """Expert ids to slots, one of them per row. The tensors keep their addresses: a captured graph reads them.

    A slot is a place for the weights of one expert on one rank; all replicas of an expert hold the same bytes, so which
    of them a row takes changes no bit.
    """

    def __init__(self, num_experts: int, num_slots: int) -> None:
        max_replicas = num_slots - num_experts + 1
        self._slots = torch.zeros(num_experts, max_replicas, dtype=torch.int64)
        self._counts = torch.ones(num_experts, dtype=torch.int64)
        self.set(tuple(slot % num_experts for slot in range(num_slots)))

    def set(self, experts: tuple[int, ...]) -> None:
        """Take another placement into force.

        Args:
            experts: the expert in each slot; every expert is in one at least.
        """
        table: list[list[int]] = [[] for _ in range(self._slots.shape[0])]
        for slot, expert in enumerate(experts):
            table[expert].append(slot)
        width = self._slots.shape[1]
        self._slots.copy_(torch.tensor([slots + [0] * (width - len(slots)) for slots in table], device="cpu"))
        self._counts.copy_(torch.tensor([len(slots) for slots in table], device="cpu"))

    def slots(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """The slot for every expert of every row; rows take the replicas of an expert in turn.

        Args:
            topk_idx: [num_rows, top_k] expert ids.

        Returns:
            [num_rows, top_k] int64.

        Invariance: which replica serves a row follows its number in the step; the results of all are the same.
        """
        ids = topk_idx.long()
        rows = torch.arange(ids.shape[0], device=ids.device)
        return self._slots[ids, rows[:, None] % self._counts[ids]]


@dataclass(slots=True, kw_only=True)
class ExpertLoad:
    """Rows that every slot of every layer got in the present step, of this replica's own rows.

    Attributes:
        counts: [num_layers, num_slots] int32.
        is_real: [max_num_rows, top_k] int32, 1 where a row is none that fills up a graph.
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

    def add(self, layer: int, slots: torch.Tensor) -> None:
        """Count the rows of a layer.

        Args:
            layer: number of the layer.
            slots: [num_rows, top_k] int64; rows that bounded replay computes beyond ``max_num_rows`` are left out.
        """
        is_real = self.is_real[: slots.shape[0]]
        self.counts[layer].scatter_add_(0, slots[: is_real.shape[0]].flatten(), is_real.flatten())
