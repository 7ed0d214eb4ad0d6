"""What the layers of one step share: rows, positions, rotations, window slots."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from deepinfer_kernels.swa_indices import window_slots
from deepinfer_plugin.model.rope import RotaryTables, Rotation

if TYPE_CHECKING:
    from deepinfer_plugin.cache.metadata import CacheMetadata


class Step:
    """One forward pass over a batch; computed on the device from buffers that a CUDA graph can replay.

    Attributes:
        positions: [num_tokens] int64.
        req_idx: [num_tokens] int32, row of the request in the batch; -1 for a row that only pads the batch.
        max_seq_len: upper bound of the context lengths, known on the host.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        attn_metadata: Mapping[str, "CacheMetadata"],
        tables: RotaryTables,
        sliding_window: int,
    ) -> None:
        self.positions = positions
        self.attn_metadata = attn_metadata
        self._tables = tables
        self._sliding_window = sliding_window
        first = next(iter(attn_metadata.values()))
        self.max_seq_len = first.max_seq_len
        rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        ends = first.query_start_loc[1:]
        req_idx = torch.searchsorted(ends, rows, right=True, out_int32=True)
        self.req_idx = torch.where(rows < ends[-1], req_idx, -1)
        self._floor = torch.zeros_like(positions)
        self._rotations: dict[tuple[int, int], Rotation] = {}
        self._window_slots: dict[int, torch.Tensor] = {}

    def rotation(self, ratio: int) -> Rotation:
        """Rotation of queries and window keys at their own positions."""
        return self._rotation(self.positions, min(ratio, 1), 0)

    def entry_rotation(self, ratio: int) -> Rotation:
        """Rotation of a compressed entry: at the first token of the group that the row's token belongs to."""
        return self._rotation(self.positions - self.positions % ratio, 1, ratio)

    def window_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_tokens, sliding_window] int64 token slots, ascending positions first, then -1."""
        key = metadata.block_table.data_ptr()
        if key not in self._window_slots:
            self._window_slots[key] = window_slots(
                self.positions,
                self.req_idx,
                metadata.block_table,
                metadata.block_size,
                self._sliding_window,
                self._floor,
            )
        return self._window_slots[key]

    def entry_write_slots(self, metadata: "CacheMetadata", ratio: int) -> torch.Tensor:
        """[num_tokens] int64 entry slots: only the last token of a group writes its entry."""
        token_slots = metadata.slot_mapping[: self.positions.shape[0]]
        if ratio == 1:
            return token_slots
        closes_group = (self.positions + 1) % ratio == 0
        return torch.where(closes_group & (token_slots >= 0), token_slots // ratio, -1)

    def token_write_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_tokens] int64 token slots of a cache with one record per token."""
        return metadata.slot_mapping[: self.positions.shape[0]]

    def _rotation(self, positions: torch.Tensor, table: int, group: int) -> Rotation:
        key = (table, group)
        if key not in self._rotations:
            self._rotations[key] = self._tables.rotation(positions, table)
        return self._rotations[key]
