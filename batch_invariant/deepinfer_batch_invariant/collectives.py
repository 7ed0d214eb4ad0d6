"""Exchanges between the ranks that share a layer. They move bytes in the order of the ranks and add nothing.

A sum that crosses ranks would have one order for every number of ranks. So no layer is cut along the axis of a sum:
ranks own outputs (columns, heads, experts, rows of a table), and what they own is put side by side. Which way the bytes
take (memory that ranks of one host map of each other, or the process group) follows the width of a row and changes
none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from deepinfer_kernels import peer_exchange
from deepinfer_kernels.peer_exchange import PeerMemory

# PyTorch 2.14 renamed it; 2.11 knows the old name only.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among ``size`` that share a layer; ``group`` is None where it is alone.

    ``peers`` is memory of the ranks that all of them map; None: every exchange goes through the group.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None
    peers: PeerMemory | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        return self.size == 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """What every rank holds, in the order of the ranks.

        Args:
            x: any shape and dtype, the same on every rank.

        Returns:
            [size, *x.shape], dtype of ``x``, a new tensor.

        Invariance: exact; bytes are copied.
        """
        if self.is_alone:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel() > 0:
            _all_gather(_bytes(out), _bytes(x), group=self.group)
        return out

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Put the columns that every rank owns side by side.

        Args:
            x: [num_rows, ..., num_columns], the same shape on every rank.

        Returns:
            [num_rows, ..., size * num_columns], dtype of ``x``.

        Invariance: exact; bytes are copied.
        """
        if self.is_alone:
            return x
        if self.peers is not None and x.numel() > 0 and self.peers.holds(x, self.size):
            return peer_exchange.gather_columns(self.peers, x.flatten(0, -2)).view(*x.shape[:-1], -1)
        return self.gather(x).movedim(0, -2).flatten(-2)

    def merge_rows(self, x: torch.Tensor, owner: torch.Tensor, *, is_cut: bool = False) -> torch.Tensor:
        """Take every row from the rank that owns it.

        Args:
            x: [num_rows, num_columns], the same shape on every rank; rows of other owners have no meaning.
            owner: [num_rows] int32, the same on every rank.
            is_cut: whether rank i takes the i-th equal run of columns only.

        Returns:
            [num_rows, num_columns], with ``is_cut`` [num_rows, num_columns / size], dtype of ``x``.

        Invariance: exact; bytes are copied.
        """
        if self.is_alone:
            return x
        width = x.shape[1] // self.size if is_cut else x.shape[1]
        if self.peers is not None and x.numel() > 0 and self.peers.holds(x[:, :width]):
            return peer_exchange.merge_rows(self.peers, x, owner, is_cut=is_cut)
        # [ranks, num_rows, width]
        found = self.exchange(x.view(-1, self.size, width).movedim(1, 0)) if is_cut else self.gather(x)
        return torch.gather(found, 0, owner.long()[None, :, None].expand(1, *found.shape[1:]))[0]

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send part i of ``x`` to rank i.

        Args:
            x: [size, ...], the same shape on every rank.

        Returns:
            [size, ...], dtype of ``x``: part i is what rank i had for this rank.

        Invariance: exact; bytes are copied.
        """
        if self.is_alone:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel() > 0:
            distributed.all_to_all_single(_bytes(out), _bytes(x), group=self.group)
        return out


ALONE = Ranks()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """[size in bytes] uint8: not every backend knows every dtype."""
    return x.view(-1).view(torch.uint8)
