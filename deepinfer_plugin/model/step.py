"""What the layers of one step share: rows, positions, rotations, window slots."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch

from deepinfer_kernels.swa_indices import window_slots
from deepinfer_plugin.model.rope import RotaryTables, Rotation

if TYPE_CHECKING:
    from deepinfer_plugin.cache.metadata import CacheMetadata


class Step:
    """Rows that pass layers together; computed on the device from buffers that a CUDA graph can replay.

    Attributes:
        positions: [num_rows] int64.
        req_idx: [num_rows] int32, row of the request in the batch; -1 for a row that only pads the batch.
        attn_metadata: of the engine step, by cache.
        max_seq_len: upper bound of the context lengths, known on the host.
        is_image: [num_rows] bool, rows inside an image span; None: no row can be one.
        writes_entries: whether the rows store compressed KV and index keys; if not, they are stored already.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        req_idx: torch.Tensor,
        attn_metadata: Mapping[str, "CacheMetadata"],
        tables: RotaryTables,
        sliding_window: int,
        *,
        floors: torch.Tensor | None = None,
        source_rows: torch.Tensor | None = None,
        has_replayed_rows: bool = False,
        writes_entries: bool = True,
        is_image: torch.Tensor | None = None,
    ) -> None:
        """Rows of an engine step.

        Args:
            positions: [num_rows] int64.
            req_idx: [num_rows] int32.
            attn_metadata: of the engine step, by cache.
            tables: rotation tables of the model.
            sliding_window: of the model.
            floors: [num_rows] int64, first window key that a row may see; None: no floor.
            source_rows: [num_rows] int64, row of the engine step, -1 for a replayed row; None: all its rows in order.
            has_replayed_rows: whether any source row is -1.
            writes_entries: see above.
            is_image: see above.
        """
        self.positions = positions
        self.req_idx = req_idx
        self.attn_metadata = attn_metadata
        self.max_seq_len = next(iter(attn_metadata.values())).max_seq_len
        self.writes_entries = writes_entries
        self.is_image = is_image
        self._tables = tables
        self._sliding_window = sliding_window
        self._floors = torch.zeros_like(positions) if floors is None else floors
        self._source_rows = source_rows
        self._has_replayed_rows = has_replayed_rows
        self._rotations: dict[tuple[int, int], Rotation] = {}
        self._window_slots: dict[int, torch.Tensor] = {}
        self._num_visible: dict[int, torch.Tensor] = {}

    @classmethod
    def of_batch(
        cls,
        positions: torch.Tensor,
        attn_metadata: Mapping[str, "CacheMetadata"],
        tables: RotaryTables,
        sliding_window: int,
        is_image: torch.Tensor | None = None,
    ) -> Self:
        """All rows of an engine step, without floors; positions: [num_tokens] int64, is_image: [num_tokens] bool."""
        first = next(iter(attn_metadata.values()))
        rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        ends = first.query_start_loc[1:]
        req_idx = torch.searchsorted(ends, rows, right=True, out_int32=True)
        req_idx = torch.where(rows < ends[-1], req_idx, -1)
        return cls(positions, req_idx, attn_metadata, tables, sliding_window, is_image=is_image)

    def with_floors(self, request_floors: torch.Tensor) -> "Step":
        """The same rows, each with the window floor of its request; request_floors: [max_num_reqs] int64."""
        step = Step(
            self.positions,
            self.req_idx,
            self.attn_metadata,
            self._tables,
            self._sliding_window,
            floors=request_floors[self.req_idx.clamp_min(0).long()],
            is_image=self.is_image,
        )
        step._rotations, step._num_visible = self._rotations, self._num_visible
        return step

    def kept(self, rows: torch.Tensor) -> "Step":
        """Only ``rows`` [num_kept] int64 of this engine step; their entries are stored with those of all rows."""
        return Step(
            self.positions[rows],
            self.req_idx[rows],
            self.attn_metadata,
            self._tables,
            self._sliding_window,
            floors=self._floors[rows],
            source_rows=rows,
            writes_entries=False,
            is_image=None if self.is_image is None else self.is_image[rows],
        )

    def replaying(
        self,
        positions: torch.Tensor,
        req_idx: torch.Tensor,
        floors: torch.Tensor,
        source_rows: torch.Tensor,
        is_image: torch.Tensor | None,
    ) -> "Step":
        """Rows of this engine step beside replayed ones, whose source row is -1; arguments as in ``__init__``."""
        return Step(
            positions,
            req_idx,
            self.attn_metadata,
            self._tables,
            self._sliding_window,
            floors=floors,
            source_rows=source_rows,
            has_replayed_rows=True,
            is_image=is_image,
        )

    def rotation(self, ratio: int) -> Rotation:
        """Rotation of queries and window keys at their own positions."""
        return self._rotation(self.positions, min(ratio, 1), 0)

    def entry_rotation(self, ratio: int) -> Rotation:
        """Rotation of a compressed entry: at the first token of the group that the row's token belongs to."""
        return self._rotation(self.positions - self.positions % ratio, 1, ratio)

    def num_visible(self, ratio: int) -> torch.Tensor:
        """[num_rows] int64: compressed entries of the request that a row may see, those closed up to its token."""
        if ratio not in self._num_visible:
            self._num_visible[ratio] = (self.positions + 1) // ratio
        return self._num_visible[ratio]

    def window_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_rows, sliding_window] int64 token slots, ascending positions first, then -1."""
        key = metadata.block_table.data_ptr()
        if key not in self._window_slots:
            self._window_slots[key] = window_slots(
                self.positions,
                self.req_idx,
                metadata.block_table,
                metadata.block_size,
                self._sliding_window,
                self._floors,
            )
        return self._window_slots[key]

    def entry_write_slots(self, metadata: "CacheMetadata", ratio: int) -> torch.Tensor:
        """[num_rows] int64 entry slots: only the last token of a group writes its entry, a replayed row none."""
        token_slots = self._source_slots(metadata)
        if ratio == 1:
            return token_slots
        closes_group = (self.positions + 1) % ratio == 0
        return torch.where(closes_group & (token_slots >= 0), token_slots // ratio, -1)

    def token_write_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_rows] int64 token slots of a cache with one record per token; replayed rows write theirs again."""
        slots = self._source_slots(metadata)
        if not self._has_replayed_rows:
            return slots
        assert self._source_rows is not None
        size = metadata.block_size
        blocks = metadata.block_table[self.req_idx.long(), self.positions // size].long()
        return torch.where(self._source_rows < 0, blocks * size + self.positions % size, slots)

    def _source_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """Slots that vLLM mapped the rows to; -1 for a replayed row, which is none of the engine step's."""
        if self._source_rows is None:
            return metadata.slot_mapping[: self.positions.shape[0]]
        slots = metadata.slot_mapping[self._source_rows.clamp_min(0)]
        return slots.masked_fill(self._source_rows < 0, -1) if self._has_replayed_rows else slots

    def _rotation(self, positions: torch.Tensor, table: int, group: int) -> Rotation:
        key = (table, group)
        if key not in self._rotations:
            self._rotations[key] = self._tables.rotation(positions, table)
        return self._rotations[key]
