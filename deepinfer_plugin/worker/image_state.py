"""Where the images of running requests lie: flags of image rows, and how far back n-grams reach.

REF knows image rows by their spans. A text token that has the id of the placeholder is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

Encode = Callable[[MultiModalFeatureSpec], torch.Tensor]
STEPS_IN_FLIGHT = 2  # with drafts: one runs while the next is planned; more are refused beside drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The image spans of one request, ascending.

    Attributes:
        starts: [num_images] first position of each.
        ends: [num_images] position behind each.
        features: what vLLM knows of each, with its patches.
    """

    starts: Integers
    ends: Integers
    features: tuple[MultiModalFeatureSpec, ...]

    @classmethod
    def of_features(cls, features: Sequence[MultiModalFeatureSpec]) -> Spans:
        """The spans of a request's features, in any order."""
        ordered = sorted(features, key=lambda feature: feature.mm_position.offset)
        starts = np.asarray([feature.mm_position.offset for feature in ordered], dtype=np.int64)
        lengths = np.asarray([feature.mm_position.length for feature in ordered], dtype=np.int64)
        return cls(starts=starts, ends=starts + lengths, features=tuple(ordered))

    def last_before(self, positions: Integers) -> Integers:
        """[n] index of the last image that begins at or before each position, -1 for none."""
        return np.asarray(np.searchsorted(self.starts, positions, side="right") - 1, dtype=np.int64)

    def text_starts(self, positions: Integers) -> Integers:
        """[n] first position of the text that each position continues; behind the position inside an image."""
        last = self.last_before(positions)
        return np.where(last >= 0, self.ends[last.clip(0)], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Image rows of a step or of an encoder pass.

    Attributes:
        is_image: [num_rows] bool.
        text_starts: [num_rows] int64, see ``Spans``: n-grams reach back to it; None: no row is near an image.
    """

    is_image: torch.Tensor
    text_starts: torch.Tensor | None = None

    def block(self, lookback_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hide the tokens that n-grams do not reach.

        Args:
            lookback_ids: [num_rows, depth] int64, nearest first.
            positions: [num_rows] int64.

        Returns:
            [num_rows, depth], -1 at an image and beyond it.
        """
        if self.text_starts is None:
            return lookback_ids
        shift = torch.arange(1, lookback_ids.shape[1] + 1, device=positions.device)
        return lookback_ids.masked_fill(positions[:, None] - shift < self.text_starts[:, None], -1)


class ImageState:
    """Image spans by slot of the runner, and the buffer of flags."""

    def __init__(self, max_num_tokens: int, depth: int, device: torch.device, num_drafts: int = 0) -> None:
        self._device = device
        # How far behind an image a row may still look into it, as the host counts rows. With asynchronous scheduling it
        # counts all drafts of the steps in flight as accepted: the row on the device may stand that much earlier.
        self._reach = depth + STEPS_IN_FLIGHT * num_drafts
        self._spans: dict[int, Spans] = {}
        # one buffer for the life of the process: a CUDA graph reads the same address at every replay
        self._flags = torch.zeros(max_num_tokens, dtype=torch.bool, device=device)
        self._has_flags = False

    def add_request(self, slot: int, data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption."""
        if data.mm_features:
            self._spans[slot] = Spans.of_features(data.mm_features)
        else:
            self._spans.pop(slot, None)

    def dummy_rows(self, num_tokens: int) -> ImageRows:
        """For runs that measure, warm up or capture."""
        return ImageRows(is_image=self._flags[:num_tokens])

    def rows(self, input_batch: InputBatch) -> ImageRows:
        """Flags of a step. Decode rows are none, and lie behind every image: no count of drafts moves their text."""
        num_tokens = input_batch.num_tokens_after_padding
        text_starts = None
        for index, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            spans = self._spans.get(slot)
            start = int(input_batch.num_computed_tokens_np[index])
            if spans is None or start - self._reach >= spans.ends[-1]:
                continue
            if text_starts is None:
                text_starts, is_image = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.bool_)
            positions = np.arange(start, start + int(input_batch.num_scheduled_tokens[index]))
            first = int(input_batch.query_start_loc_np[index])
            rows = slice(first, first + len(positions))
            text_starts[rows] = spans.text_starts(positions)
            is_image[rows] = positions < text_starts[rows]
        if text_starts is None:
            if self._has_flags:
                self._flags.zero_()
                self._has_flags = False
            return self.dummy_rows(num_tokens)
        async_tensor_h2d(is_image, out=self._flags[:num_tokens], dtype=torch.bool)
        self._flags[num_tokens:].zero_()
        self._has_flags = True
        on_device = async_tensor_h2d(text_starts, device=self._device)
        return ImageRows(is_image=self._flags[:num_tokens], text_starts=on_device)

    def pass_rows(self, slots: Integers, positions: Integers) -> ImageRows | None:
        """Flags of the rows of an encoder pass.

        Args:
            slots: [num_rows] slot of each row's request.
            positions: [num_rows].

        Returns:
            None if no request of the pass has an image.
        """
        if not any(slot in self._spans for slot in np.unique(slots).tolist()):
            return None
        text_starts = np.zeros(len(positions), dtype=np.int64)
        for slot, rows in self._rows_by_slot(slots):
            text_starts[rows] = self._spans[slot].text_starts(positions[rows])
        return ImageRows(
            is_image=async_tensor_h2d(positions < text_starts, device=self._device),
            text_starts=async_tensor_h2d(text_starts, device=self._device),
        )

    def fill_replayed(
        self,
        embeds: torch.Tensor,
        slots: Integers,
        positions: Integers,
        is_replayed: npt.NDArray[np.bool_],
        encode: Encode,
    ) -> None:
        """Overwrite replayed rows that lie inside an image.

        Args:
            embeds: [num_rows, hidden_size], changed in place.
            slots: [num_rows] slot of each row's request.
            positions: [num_rows].
            is_replayed: [num_rows]; other rows stay.
            encode: the span of an image, [length, hidden_size].
        """
        for slot, rows in self._rows_by_slot(slots):
            spans = self._spans[slot]
            rows = rows[is_replayed[rows]]
            last = spans.last_before(positions[rows])
            inside = (last >= 0) & (positions[rows] < spans.ends[last.clip(0)])
            for image in np.unique(last[inside]).tolist():
                chosen = rows[inside & (last == image)]
                source = async_tensor_h2d(positions[chosen] - spans.starts[image], device=self._device)
                embeds[async_tensor_h2d(chosen, device=self._device)] = encode(spans.features[image])[source]

    def _rows_by_slot(self, slots: Integers) -> list[tuple[int, Integers]]:
        return [(slot, np.flatnonzero(slots == slot)) for slot in np.unique(slots).tolist() if slot in self._spans]
