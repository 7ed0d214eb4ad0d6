"""Routed experts on several ranks: rows go to the ranks that hold their experts, results come back.

Every rank computes the slots of its own experts for the rows of all replicas. What comes back to a rank is, of its own
replica's rows, every slot, and of the columns its share. There the slots are added in ascending expert id, in the order
that one rank alone has; so neither the number of ranks nor the place of an expert changes a bit.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from vllm.forward_context import get_forward_context

from deepinfer_kernels.expert_places import expert_places
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.placement import Placement
from deepinfer_plugin.model.shares import own_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Rows and their experts. ``topk_idx`` counts the experts of this rank; -1: the expert is on another one.

    x: [num_rows, hidden_size]; topk_idx, topk_weights: [num_rows, top_k]. ``owner`` is the rank of every expert of the
    rows that were given, [num_given_rows, top_k] int32.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    owner: torch.Tensor


class ExpertExchange:
    """Sends rows and fetches results for one mixture of experts.

    Attributes:
        slots: places for experts on this rank.
        placement: which experts are where, if they can move.
    """

    def __init__(self, context: BuildContext, layer: int) -> None:
        parallel, (num_experts, _) = context.parallel, context.expert_counts(layer)
        is_counted = context.is_backbone(layer)
        num_extra = parallel.num_extra_experts if is_counted else 0
        self._tensor, self._ranks, self._replicas = parallel.tensor, parallel.experts, parallel.replicas
        self.slots = own_slots(num_experts, parallel, num_extra)
        is_moved = parallel.balancing is not None and is_counted
        self.placement = Placement(num_experts, num_experts + num_extra) if is_moved else None
        self._load, self._layer = context.load if is_counted else None, layer

    @property
    def has_replicas(self) -> bool:
        """Whether rows of other replicas come to this rank."""
        return not self._replicas.is_alone

    def send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Routed:
        """The rows of all replicas, replica by replica, each filled up with rows that no expert takes.

        Args:
            x: [num_rows, hidden_size].
            topk_idx: [num_rows, top_k] int32 expert ids.
            topk_weights: [num_rows, top_k] fp32.
        """
        placement, load = self.placement, self._load
        slots, here, owner = expert_places(
            topk_idx,
            slots_per_rank=len(self.slots),
            rank=self._ranks.rank,
            table=None if placement is None else placement.table,
            num_replicas=None if placement is None else placement.num_replicas,
            is_real=None if load is None else load.is_real,
            counts=None if load is None else load.counts[self._layer],
        )
        if self.has_replicas:
            x, slots, topk_weights = (
                self._from_replicas(rows, filling) for rows, filling in ((x, 0.0), (slots, -1), (topk_weights, 0.0))
            )
            _, here, _ = expert_places(slots, slots_per_rank=len(self.slots), rank=self._ranks.rank)
        return Routed(x=x, topk_idx=here, topk_weights=topk_weights, owner=owner)

    def fetch(self, out: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """All slots of this replica's rows, in this rank's columns.

        Args:
            out: [rows of all replicas, top_k, hidden_size], results of this rank's experts.
            owner: [num_rows, top_k] int32, the ranks that ``send`` found.

        Returns:
            [num_rows, top_k, hidden_size / ranks of a replica], dtype of ``out``.
        """
        num_rows, top_k = owner.shape
        if not self.has_replicas:  # every rank has all rows
            return self._tensor.merge_rows(out.flatten(0, 1), owner.flatten(), is_cut=True).view(num_rows, top_k, -1)
        blocks = out.view(self._replicas.size, -1, top_k, self._tensor.size, out.shape[2] // self._tensor.size)
        parts = blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [ranks, rows of a replica, top_k, columns of a rank]
        found = self._ranks.exchange(parts)[:, :num_rows]
        return torch.gather(found, 0, owner.long()[None, :, :, None].expand(1, *found.shape[1:]))[0]

    def _from_replicas(self, rows: torch.Tensor, filling: float) -> torch.Tensor:
        """[num_rows, n] of every replica -> [replicas * rows of the longest, n].

        The ranks of a replica hold the same rows, so one of each replica sends them to this one.
        """
        metadata = get_forward_context().dp_metadata
        assert metadata is not None, "vLLM agrees on the rows of a step where there are replicas"
        longest = int(metadata.num_tokens_across_dp_cpu.numpy().max())
        padded = pad(rows, (0, 0, 0, longest - rows.shape[0]), value=filling)
        return self._replicas.gather(padded).flatten(0, 1)
