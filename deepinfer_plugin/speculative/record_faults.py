"""Planted faults of the record of drafts: context managers that yield ``Calls``, for ``EngineRun.faults``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.speculative.record import DraftRecord


@contextmanager
def confidence_of_the_row() -> Iterator[Calls]:
    """Confidences are kept by row of the batch, which is the slot only until a request ends."""
    count, original = Calls(), DraftRecord.store_confidence

    def store(self: DraftRecord, slots: torch.Tensor, confidence: torch.Tensor) -> None:
        count.calls += 1
        original(self, torch.arange(len(slots), device=slots.device), confidence)

    with mock.patch.object(DraftRecord, "store_confidence", store):
        yield count
