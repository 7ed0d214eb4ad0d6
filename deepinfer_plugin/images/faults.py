"""Planted faults of images: each breaks one thing that an image's answer rests on, so that a test shows it notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.images.processing import ImageProcessor
from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM
from deepinfer_plugin.worker.image_state import ImageRows, ImageState, Spans


@contextmanager
def features_mixed_in_a_batch() -> Iterator[Calls]:
    """Images that are encoded together share a sum: each gets a little of the mean of all."""
    count, original = Calls(), DeepseekV41ForCausalLM.embed_multimodal

    def mixed(model: DeepseekV41ForCausalLM, **kwargs: object) -> list[torch.Tensor]:
        spans = original(model, **kwargs)
        if len(spans) == 1:
            return spans
        count.calls += 1
        mean = torch.stack([span.mean(dim=0) for span in spans]).mean(dim=0)
        return [span + mean / 64 for span in spans]

    with mock.patch.object(DeepseekV41ForCausalLM, "embed_multimodal", mixed):
        yield count


@contextmanager
def spans_forgotten_behind_a_chunk() -> Iterator[Calls]:
    """A chunk that begins inside a span takes its first rows for text."""
    count, original = Calls(), Spans.text_starts

    def forgotten(spans: Spans, positions: Any) -> Any:
        found = original(spans, positions)
        if len(positions) and positions[0] > 0 and found[0] > positions[0]:
            count.calls += 1
            found = found.copy()
            found[found > positions] = 0
        return found

    with mock.patch.object(Spans, "text_starts", forgotten):
        yield count


@contextmanager
def ngrams_across_images() -> Iterator[Calls]:
    """Engram looks back through an image where a chunk begins right behind one."""
    count = Calls()

    def unblocked(rows: ImageRows, lookback_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions
        count.calls += rows.text_starts is not None
        return lookback_ids

    with mock.patch.object(ImageRows, "block", unblocked):
        yield count


@contextmanager
def replayed_rows_as_text() -> Iterator[Calls]:
    """Rows of a span that are computed again take the embedding of the placeholder."""
    count = Calls()

    def unfilled(*args: Any) -> None:
        del args
        count.calls += 1

    with mock.patch.object(ImageState, "fill_replayed", unfilled):
        yield count


@contextmanager
def images_known_by_size() -> Iterator[Calls]:
    """Caches take two images of one size for the same."""
    count = Calls()

    def hashes(processor: ImageProcessor, inputs: Any) -> dict[str, Sequence[str]]:
        del processor
        count.calls += 1
        return {key: [str(item.size) for item in items] for key, items in inputs.mm_data_items.items()}

    with mock.patch.object(ImageProcessor, "_get_mm_hashes", hashes):
        yield count
