"""Planted faults of drafting, and an observer of the drafts that are verified. None of them may change an answer.

Each is a context manager that yields ``Calls``, for ``EngineRun.faults``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from deepinfer_plugin.draft.block_hash import block_hash
from deepinfer_plugin.draft.drafter import DSparkV41DraftModel
from deepinfer_plugin.draft.draws import Draws
from deepinfer_plugin.draft.step import DraftStep
from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.speculative.verify import ExactMatchVerifier


@contextmanager
def verified_drafts() -> Iterator[Calls]:
    """Observer: counts the sum of ``block_hash`` over all blocks that are verified."""
    count, original = Calls(), ExactMatchVerifier.__call__

    def verify(self: ExactMatchVerifier, logits: torch.Tensor, input_batch: InputBatch, *args: Any) -> Any:
        starts = input_batch.cu_num_logits.tolist()
        ids = input_batch.input_ids[input_batch.logits_indices].tolist()
        positions = input_batch.positions[input_batch.logits_indices].tolist()
        for start, stop in itertools.pairwise(starts):
            if stop - start > 1:
                count.calls += block_hash(positions[start], ids[start:stop])
        return original(self, logits, input_batch, *args)

    with mock.patch.object(ExactMatchVerifier, "__call__", verify):
        yield count


@contextmanager
def other_noise() -> Iterator[Calls]:
    """Drafts are drawn with noise of their own."""
    count, original = Calls(), Draws.draw

    def draw(self: Draws, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count.calls += 1
        return original(self, logits, slots, positions + (1 << 20))

    with mock.patch.object(Draws, "draw", draw):
        yield count


@contextmanager
def context_lost() -> Iterator[Calls]:
    """No verified token leaves anything for drafts to read."""
    count, original = Calls(), DSparkV41DraftModel.precompute_and_store_context_kv

    def store(self: DSparkV41DraftModel, states: torch.Tensor, positions: torch.Tensor, slots: Any = None) -> None:
        count.calls += 1
        original(self, states, positions, None if slots is None else [torch.full_like(s, -1) for s in slots])

    with mock.patch.object(DSparkV41DraftModel, "precompute_and_store_context_kv", store):
        yield count


@contextmanager
def block_causal() -> Iterator[Calls]:
    """A row of the block does not see the rows behind it."""
    count, original = Calls(), DraftStep.window_slots

    def window_slots(self: DraftStep, metadata: Any) -> torch.Tensor:
        count.calls += 1
        slots = original(self, metadata)
        place = torch.arange(slots.shape[1], device=slots.device)
        return slots.masked_fill(place > self._sliding_window + self._offset[:, None], -1)

    with mock.patch.object(DraftStep, "window_slots", window_slots):
        yield count
