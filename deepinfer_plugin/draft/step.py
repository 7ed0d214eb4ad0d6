"""Rows of a draft pass: the block of every request behind the window of its verified tokens."""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from deepinfer_kernels.swa_indices import window_slots
from deepinfer_kernels.tiling import ATTENTION_SLOT_TILE
from deepinfer_plugin.model.step import Step

if TYPE_CHECKING:
    from deepinfer_plugin.cache.metadata import CacheMetadata


class DraftStep(Step):
    """Every request has as many rows as drafts, at consecutive positions behind its last verified token.

    All rows of a request read one list: the verified tokens of the window, then the whole block (spec §4.3).
    """

    def token_write_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_rows] int64 slots of the block's own records; -1 for a row beyond the longest context.

        vLLM clamps the positions of such rows, and their slots then belong to other tokens.
        """
        is_real = self.positions == (self._first + self._offset)
        return torch.where(is_real, metadata.slot_mapping[: self.positions.shape[0]], -1)

    def window_slots(self, metadata: "CacheMetadata") -> torch.Tensor:
        """[num_rows, sliding_window + num_drafts and padding] int64 token slots.

        Padded with -1, which changes nothing, to what the kernels of a GPU take.
        """
        key = metadata.block_table.data_ptr()
        if key not in self._window_slots:
            context = window_slots(
                self._first - 1,
                self.req_idx,
                metadata.block_table,
                metadata.block_size,
                self._sliding_window,
                torch.zeros_like(self.positions),
            )
            num_rows, num_drafts = self.positions.shape[0], self._num_drafts
            block = self.token_write_slots(metadata).view(-1, 1, num_drafts).expand(-1, num_drafts, -1)
            slots = torch.cat((context, block.reshape(num_rows, num_drafts)), dim=1)
            self._window_slots[key] = pad(slots, (0, -slots.shape[1] % ATTENTION_SLOT_TILE), value=-1)
        return self._window_slots[key]

    @property
    def _num_drafts(self) -> int:
        metadata = next(iter(self.attn_metadata.values()))
        num_drafts, rest = divmod(self.positions.shape[0], metadata.query_start_loc.shape[0] - 1)
        assert rest == 0, (self.positions.shape, metadata.query_start_loc.shape)
        return num_drafts

    @property
    def _first(self) -> torch.Tensor:
        """[num_rows] int64, position of the first row of each row's block."""
        return self.positions.view(-1, self._num_drafts)[:, :1].expand(-1, self._num_drafts).reshape(-1)

    @property
    def _offset(self) -> torch.Tensor:
        """[num_rows] int64, place of each row in its block."""
        rows = torch.arange(self.positions.shape[0], device=self.positions.device)
        return rows % self._num_drafts
