"""The lists of a draft pass: verified tokens of the window, then the whole block; and where the block is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from deepinfer_plugin.draft.step import DraftStep

BLOCK_SIZE, WINDOW, NUM_DRAFTS, WIDTH = 4, 6, 3, 64


def _step(first: list[int], num_reqs: int, largest: int = 1000) -> tuple[DraftStep, Any]:
    """Requests whose blocks begin at ``first``; those behind ``num_reqs`` pad the batch."""
    positions = torch.tensor([p + offset for p in first for offset in range(NUM_DRAFTS)])
    ends = [min(i, num_reqs) * NUM_DRAFTS for i in range(len(first) + 1)]
    table = torch.arange(len(first) * 50, dtype=torch.int32).view(len(first), 50) + 1
    requests = torch.arange(len(first)).repeat_interleave(NUM_DRAFTS)
    slots = table[requests, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        block_table=table,
        block_size=BLOCK_SIZE,
        slot_mapping=torch.where(requests < num_reqs, slots, -1),
        max_seq_len=200,
    )
    held = positions.clamp_max(largest)
    return DraftStep.of_batch(held, {"mtp.0": cast("Any", metadata)}, cast("Any", None), WINDOW), metadata


def _slots(metadata: Any, request: int, positions: range) -> list[int]:
    return [int(metadata.block_table[request, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]


def test_all_rows_of_a_request_read_one_list() -> None:
    step, metadata = _step([2, 21], 2)
    slots = step.window_slots(metadata)
    assert slots.shape == (2 * NUM_DRAFTS, WIDTH)
    for request, context, block in ((0, range(2), range(2, 5)), (1, range(15, 21), range(21, 24))):
        seen = _slots(metadata, request, context)
        expected = [*seen, *[-1] * (WINDOW - len(seen)), *_slots(metadata, request, block)]
        for row in range(request * NUM_DRAFTS, (request + 1) * NUM_DRAFTS):
            assert slots[row, : WINDOW + NUM_DRAFTS].tolist() == expected
    assert bool((slots[:, WINDOW + NUM_DRAFTS :] == -1).all())
    assert step.token_write_slots(metadata).tolist() == metadata.slot_mapping.tolist()


def test_a_request_that_pads_the_batch_reads_and_writes_nothing() -> None:
    step, metadata = _step([9, 0, 0], 1)
    assert bool((step.window_slots(metadata)[NUM_DRAFTS:] == -1).all())
    assert bool((step.token_write_slots(metadata)[NUM_DRAFTS:] == -1).all())


def test_rows_beyond_the_longest_context_are_neither_kept_nor_read() -> None:
    """vLLM clamps their positions, and their slots are those of other tokens."""
    step, metadata = _step([98], 1, largest=99)
    assert step.token_write_slots(metadata).tolist() == [*_slots(metadata, 0, range(98, 100)), -1]
    assert step.window_slots(metadata)[0, WINDOW : WINDOW + NUM_DRAFTS].tolist()[-1] == -1
