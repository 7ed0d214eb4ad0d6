"""Planted faults of images: their features, where a chunk or a hit cuts a span, and what caches take for one image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from deepinfer_determinism.mutants import Mutant, changed
from deepinfer_determinism.patching import Function
from deepinfer_plugin.engine_child.faults import Calls

ENGINE = "images"
_STATE = "deepinfer_plugin.worker.image_state"
_MODEL = "deepinfer_plugin.model.flash:DeepseekV41ForCausalLM"


@contextmanager
def router_bias_lost_behind_a_hit() -> Iterator[Calls]:
    """Image rows of a request whose first tokens were cached are routed as text."""
    behind: set[int] = set()
    lost: list[torch.Tensor] = []

    def change_add(original: Function, calls: Calls) -> Function:
        def add_request(self: Any, slot: int, data: Any) -> None:
            original(self, slot, data)
            (behind.add if data.num_computed_tokens > 0 else behind.discard)(slot)

        return add_request

    def change_rows(original: Function, calls: Calls) -> Function:
        def rows(self: Any, input_batch: Any) -> Any:
            is_behind = np.asarray([slot in behind for slot in input_batch.idx_mapping_np.tolist()])
            lost[:] = [torch.from_numpy(np.repeat(is_behind, input_batch.num_scheduled_tokens))]
            return original(self, input_batch)

        return rows

    def change_gate(original: Function, calls: Calls) -> Function:
        def gate(*args: Any, is_image: torch.Tensor | None, **kwargs: Any) -> Any:
            if is_image is not None:
                is_lost = is_image & lost[0]
                calls.calls += int(is_lost.sum())
                is_image = is_image & ~is_lost
            return original(*args, is_image=is_image, **kwargs)

        return gate

    with (
        changed(f"{_STATE}:ImageState.add_request", change_add),
        changed(f"{_STATE}:ImageState.rows", change_rows),
        changed("deepinfer_kernels.moe_gate:moe_gate", change_gate) as calls,
    ):
        yield calls


def ngrams_across_a_span_behind_a_hit() -> AbstractContextManager[Calls]:
    """Engram looks back into an image where a chunk of several rows begins right behind it."""

    def change(original: Function, calls: Calls) -> Function:
        def block(self: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            blocked: torch.Tensor = original(self, ids, positions)
            if self.text_starts is None:
                return blocked
            begins = torch.ones_like(positions, dtype=torch.bool)
            begins[1:] = positions[1:] != positions[:-1] + 1
            is_open = begins & (positions == self.text_starts) & (positions > 0)
            calls.calls += int(is_open.sum())
            return torch.where(is_open[:, None], ids, blocked)

        return block

    return changed(f"{_STATE}:ImageRows.block", change)


@contextmanager
def delimiters_swapped_in_a_batch() -> Iterator[Calls]:
    """Start and end change places in every image but the first that a step encodes."""
    encoded = [0]

    def change_encode(original: Function, calls: Calls) -> Function:
        def encode(self: Any, **kwargs: Any) -> Any:
            encoded[0] = 0
            return original(self, **kwargs)

        return encode

    def change_span(original: Function, calls: Calls) -> Function:
        def span(cells: torch.Tensor, roles: Any, delimiters: Sequence[torch.Tensor]) -> Any:
            encoded[0] += 1
            calls.calls += encoded[0] > 1
            return original(cells, roles, delimiters[::-1] if encoded[0] > 1 else delimiters)

        return span

    with (
        changed(f"{_MODEL}.embed_multimodal", change_encode),
        changed("deepinfer_plugin.model.vision:image_span", change_span) as calls,
    ):
        yield calls


def flags_of_the_row_before() -> AbstractContextManager[Calls]:
    """Image flags stand one row too late in a step of several requests."""

    def change(original: Function, calls: Calls) -> Function:
        def rows(self: Any, input_batch: Any) -> Any:
            found = original(self, input_batch)
            if input_batch.num_reqs > 1 and bool(found.is_image.any()):
                calls.calls += 1
                found.is_image[:] = found.is_image.roll(1)
            return found

        return rows

    return changed(f"{_STATE}:ImageState.rows", change)


_PLUGIN, _OF = "deepinfer_plugin.images.faults", "deepinfer_determinism.mutants_images"


def _mutant(name: str, what: str, relation: str, module: str = _OF) -> Mutant:
    return Mutant(name=name, what=what, fault=f"{module}:{name}", relation=relation, engine=ENGINE)


IMAGE_MUTANTS: tuple[Mutant, ...] = (
    _mutant("features_mixed_in_a_batch", "Images that a step encodes together share a sum.", "order", _PLUGIN),
    _mutant("delimiters_swapped_in_a_batch", "Later images of a step have start and end exchanged.", "order"),
    _mutant("flags_of_the_row_before", "Image flags stand one row too late beside other requests.", "order"),
    _mutant("span_shifted_at_a_chunk_border", "A span cut by a border goes on one row too late.", "chunks", _PLUGIN),
    _mutant("spans_forgotten_behind_a_chunk", "A chunk that begins inside a span is text.", "chunks", _PLUGIN),
    _mutant("images_known_by_size", "Caches take two images of one size for the same.", "cache hit", _PLUGIN),
    _mutant("router_bias_lost_behind_a_hit", "Image rows behind a hit are routed as text.", "cache hit"),
    _mutant("ngrams_across_a_span_behind_a_hit", "Engram looks into the image that a hit ends with.", "cache hit"),
)
