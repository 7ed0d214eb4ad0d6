"""An observer of the caches: what the next step of a request may read is a function of the request's tokens.

Whatever drafts have been there, an engine without drafts holds the same bytes behind the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock
from zlib import crc32

import torch

from deepinfer_plugin.engine_child.faults import Calls

if TYPE_CHECKING:
    from deepinfer_plugin.cache.layers import CacheLayer
    from deepinfer_plugin.cache.metadata import CacheMetadata

WINDOW, ENTRIES, KEYS, RING = KINDS = ("window", "entries", "keys", "pair_state")
DIFFERENT = -1  # no crc32
DRAFT_CACHES = "mtp."  # an engine without drafts has none


@contextmanager
def cache_states(name: str = "") -> Iterator[Calls]:
    """Observer: a hash of every kind of cache, by the tokens that it follows from, whenever a request takes a step.

    Args:
        name: tells several observers of one engine apart; it changes nothing.
    """
    from deepinfer_plugin.worker.model_state import DeepInferModelState

    del name
    found, original = Calls(), DeepInferModelState.prepare_inputs

    def prepare_inputs(self: Any, input_batch: Any, req_states: Any) -> Any:
        inputs = original(self, input_batch, req_states)
        starts = input_batch.query_start_loc.tolist()
        for row, slot in enumerate(input_batch.idx_mapping.tolist()):
            num_done = int(input_batch.positions[starts[row]])
            if num_done > 0:
                tokens = req_states.all_token_ids.gpu[slot, :num_done].tolist()
                for kind, value in _hashes(self, row, num_done).items():
                    key = state_key(kind, tokens)
                    # two requests behind the same tokens must see the same bytes: a difference stays
                    found.seen[key] = value if found.seen.get(key, value) == value else DIFFERENT
                found.calls += 1
        return inputs

    with mock.patch.object(DeepInferModelState, "prepare_inputs", prepare_inputs):
        yield found


def state_key(kind: str, tokens: list[int]) -> str:
    """Name of a state: the kind of cache, and the tokens whose rows are done."""
    return f"{kind} {len(tokens)} {crc32(repr(tokens).encode())}"


def kind_of(key: str) -> str:
    """The kind of cache in a ``state_key``."""
    return key.partition(" ")[0]


def _hashes(state: Any, row: int, num_done: int) -> dict[str, int]:
    """By kind, over the caches of all layers: of what the row at position ``num_done`` may read of those before it."""
    from deepinfer_plugin.cache.layers import CacheLayer

    found: dict[str, int] = {}
    layers = state.vllm_config.compilation_config.static_forward_context
    window = state.model.config.sliding_window
    for prefix in sorted(layers):
        kind = prefix.rpartition(".")[2]
        layer = layers[prefix]
        if isinstance(layer, CacheLayer) and not prefix.startswith(DRAFT_CACHES):
            records = _readable(layer, layer.metadata(state._attn_metadata), kind, row, num_done, window)
            found[kind] = crc32(records.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found.get(kind, 0))
    return found


def _readable(
    layer: CacheLayer, metadata: CacheMetadata, kind: str, row: int, num_done: int, window: int
) -> torch.Tensor:
    """[num_records, ...] records of one cache."""
    cache, blocks = layer.kv_cache, metadata.block_table[row].long()
    if kind == RING:  # the open pair's first token
        ring = cache[blocks[0]]
        return ring[(num_done - 1) % ring.shape[0]][None] if num_done % 2 == 1 else ring[:0]
    ratio = metadata.block_size // cache.shape[1]
    first = max(0, num_done - window + 1) if kind == WINDOW else 0
    places = torch.arange(first, num_done // ratio, device=cache.device)
    return cache[blocks[places // cache.shape[1]], places % cache.shape[1]]
