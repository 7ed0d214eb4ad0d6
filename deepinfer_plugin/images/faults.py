"""Planted faults of images: each breaks one thing that an image's answer rests on, so that a test shows it notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

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
def span_shifted_at_a_chunk_border() -> Iterator[Calls]:
    """A chunk that begins inside a span takes the features of its rows one row too late."""
    count, original = Calls(), EncoderRunner.gather_mm_embeddings

    def shifted(runner: EncoderRunner, *args: Any, **options: Any) -> Any:
        found, mask = original(runner, *args, **options)
        names, _, counts, _, prompts, computed = args
        item = 0
        for name, first, chunk, length in zip(names, computed, counts, prompts, strict=True):
            spans = [feature.mm_position for feature in runner.encoder_cache.mm_features[name]]
            for span in spans if first < length else ():
                if span.offset < first + chunk and span.offset + span.length > first:
                    is_cut = span.offset < first and len(found[item]) > 1
                    count.calls += bool(is_cut)
                    found[item] = found[item].roll(1, 0) if is_cut else found[item]
                    item += 1
        return found, mask

    with mock.patch.object(EncoderRunner, "gather_mm_embeddings", shifted):
        yield count


@contextmanager
def spans_lost_after_preemption() -> Iterator[Calls]:
    """A request that comes a second time under its id has no image rows."""
    count, original = Calls(), ImageState.add_request
    seen: set[str] = set()

    def add_request(state: ImageState, slot: int, data: NewRequestData) -> None:
        original(state, slot, data)
        if data.req_id in seen:
            count.calls += state._spans.pop(slot, None) is not None
        seen.add(data.req_id)

    with mock.patch.object(ImageState, "add_request", add_request):
        yield count


@contextmanager
def images_counted() -> Iterator[Calls]:
    """No fault: counts the images that pass the tower."""
    count, original = Calls(), DeepseekV41ForCausalLM.embed_multimodal

    def counted(model: DeepseekV41ForCausalLM, **kwargs: object) -> list[torch.Tensor]:
        spans = original(model, **kwargs)
        count.calls += len(spans)
        return spans

    with mock.patch.object(DeepseekV41ForCausalLM, "embed_multimodal", counted):
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
