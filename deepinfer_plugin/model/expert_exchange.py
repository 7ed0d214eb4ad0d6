"""Routed experts on several ranks: rows go to the ranks that hold their experts, results come back.

Every rank computes the slots of its own experts for the rows of all replicas. What comes back to a rank is, of its own
replica's rows, every slot, and of the columns its share. There the slots are added in ascending expert id, in the order
that one rank alone has; so neither the number of ranks nor the place of an expert changes a bit.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from vllm.forward_context import get_forward_context

from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.shares import own_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Rows and their experts. ``topk_idx`` counts the experts of this rank; -1: the expert is on another one.

    x: [num_rows, hidden_size]; topk_idx, topk_weights: [num_rows, top_k].
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class ExpertExchange:
    """Sends rows and fetches results for one mixture of experts.

    Attributes:
        experts: ids whose weights are on this rank.
    """

    def __init__(self, parallel: Parallel, num_experts: int) -> None:
        self._tensor, self._ranks = parallel.tensor, parallel.experts
        self._num_replicas = parallel.num_replicas
        self.experts = own_experts(num_experts, parallel)

    @property
    def has_replicas(self) -> bool:
        """Whether rows of other replicas come to this rank."""
        return self._num_replicas > 1

    def send(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Routed:
        """The rows of all replicas, replica by replica, each filled up with rows that no expert takes.

        Args:
            x: [num_rows, hidden_size].
            topk_idx: [num_rows, top_k] int32 expert ids.
            topk_weights: [num_rows, top_k] fp32.
        """
        if self.has_replicas:
            x, topk_idx, topk_weights = (
                self._from_replicas(rows, filling) for rows, filling in ((x, 0.0), (topk_idx, -1), (topk_weights, 0.0))
            )
        here = topk_idx - self.experts.start
        is_here = (here >= 0) & (here < len(self.experts))
        return Routed(x=x, topk_idx=torch.where(is_here, here, -1), topk_weights=topk_weights)

    def fetch(self, out: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """All slots of this replica's rows, in this rank's columns.

        Args:
            out: [rows of all replicas, top_k, hidden_size], results of this rank's experts.
            topk_idx: [num_rows, top_k] int32, as given to ``send``.

        Returns:
            [num_rows, top_k, hidden_size / ranks of a replica], dtype of ``out``.
        """
        num_rows, top_k = topk_idx.shape
        blocks = out.view(self._num_replicas, -1, top_k, self._tensor.size, out.shape[2] // self._tensor.size)
        parts = blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [ranks, rows of a replica, top_k, columns of a rank]
        found = self._ranks.exchange(parts)[:, :num_rows]
        owner = (topk_idx // len(self.experts)).long()[None, :, :, None]
        return torch.gather(found, 0, owner.expand(1, *found.shape[1:]))[0]

    def _from_replicas(self, rows: torch.Tensor, filling: float) -> torch.Tensor:
        """[num_rows, n] of every replica -> [replicas * rows of the longest, n]."""
        metadata = get_forward_context().dp_metadata
        assert metadata is not None, "vLLM agrees on the rows of a step where there are replicas"
        longest = int(metadata.num_tokens_across_dp_cpu.numpy().max())
        padded = pad(rows, (0, 0, 0, longest - rows.shape[0]), value=filling)
        # the ranks of a replica hold the same rows: of each replica, take those of its first rank
        return self._ranks.gather(padded)[:: self._tensor.size].flatten(0, 1)
