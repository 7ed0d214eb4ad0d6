"""What the reference model keeps of one request between two calls.

Every store is one contiguous page that holds the whole request, so a slot is a position (window) or an entry
(compressed KV and index keys), and no ring, no paging and no eviction can hide a wrong index. Bytes that were never
written are 0xFF, a NaN in every record format: reading one of them shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.settings import Arithmetic

# Rows of the ratio-2 state. Two would do for a request that only moves forward; 8 is the smallest ring that engines
# use (spec §2.6), so the modulus is exercised too.
PAIR_RING = 8


@dataclass(slots=True, kw_only=True)
class RequestCache:
    """Caches of one request; ``ReferenceModel.new_cache`` makes it and ``ReferenceModel.forward`` advances it."""

    tokens: torch.Tensor  # [capacity] int64, ids fed so far, then -1
    length: int  # tokens fed so far
    is_image: torch.Tensor  # [capacity] bool, positions inside an image span
    block_table: torch.Tensor  # [1, 1] int32, the one page
    state_block: torch.Tensor  # [1] int32, the one block of pair_state
    window: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> uint8 [1, capacity, record_bytes]
    compressed: dict[int, torch.Tensor] = field(default_factory=dict)  # KV source -> uint8 [1, entries, record_bytes]
    index_keys: dict[int, torch.Tensor] = field(default_factory=dict)  # KV source -> uint8 [1, entries, record_bytes]
    pair_state: dict[int, torch.Tensor] = field(default_factory=dict)  # ratio-2 source -> fp32 [1, PAIR_RING, 2 D]
    image_rows: torch.Tensor | None = None  # [capacity, hidden_size], rows of the spans; other rows mean nothing
    decoder_floor: int = 0  # first window key that the decoder layers may read: bounded replay under ``mask``

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0]

    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take the ids of the next tokens and return their positions.

        Args:
            tokens: [num_tokens] int, ids that follow the ones fed so far.

        Returns:
            [num_tokens] int64, absolute positions.

        Raises:
            ShapeError: the request would outgrow the cache.
        """
        end = self.length + tokens.shape[0]
        if end > self.capacity:
            raise ShapeError(
                f"RequestCache: tokens is {tokens.shape[0]} ids after {self.length}, expected at most "
                f"{self.capacity} in total; make the cache with a larger capacity"
            )
        positions = torch.arange(self.length, end, device=self.tokens.device)
        self.tokens[self.length : end] = tokens.to(self.tokens)
        self.length = end
        return positions

    def place_image(self, start: int, rows: torch.Tensor) -> None:
        """Put an image at positions from ``start`` on, before its tokens are fed.

        Args:
            start: first position of the span.
            rows: [length, hidden_size] its rows at the entry of the model, in the activation dtype.
        """
        if self.image_rows is None:
            self.image_rows = rows.new_zeros(self.capacity, rows.shape[1])
        self.is_image[start : start + len(rows)] = True
        self.image_rows[start : start + len(rows)] = rows

    def rewind(self, length: int) -> None:
        """Take back the last tokens, so that they are fed again; what they stored stays until it is overwritten."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length


def new_request_cache(config: ModelConfig, arithmetic: Arithmetic, capacity: int, device: torch.device) -> RequestCache:
    """Make the empty cache of one request.

    Args:
        config: the model.
        arithmetic: decides the record formats.
        capacity: most tokens the request may reach, > 0.
        device: where the tensors live.

    Returns:
        A cache with no token in it.
    """

    def page(num_entries: int, width: int, record_format: RecordFormat) -> torch.Tensor:
        shape = (1, num_entries, record_format.record_bytes(width))
        return torch.full(shape, 0xFF, dtype=torch.uint8, device=device)

    cache = RequestCache(
        tokens=torch.full((capacity,), -1, dtype=torch.int64, device=device),
        length=0,
        is_image=torch.zeros(capacity, dtype=torch.bool, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        state_block=torch.zeros(1, dtype=torch.int32, device=device),
    )
    for layer in range(config.num_hidden_layers):
        cache.window[layer] = page(capacity, config.head_dim, arithmetic.window_format)
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        num_entries = -(-capacity // ratio)
        cache.compressed[layer] = page(num_entries, config.head_dim, arithmetic.compressed_format)
        cache.index_keys[layer] = page(num_entries, config.index_head_dim, arithmetic.index_format)
        if ratio == 2:
            state_shape = (1, PAIR_RING, 2 * config.head_dim)
            cache.pair_state[layer] = torch.full(state_shape, float("nan"), device=device)
    return cache
