"""The buffer of decoder floors holds those of the step's requests, and is written only where they differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from deepinfer_plugin.replay.window import ReplayRule
from deepinfer_plugin.worker import replay_state
from deepinfer_plugin.worker.replay_state import ReplayState

KEEP = 5
PROMPTS = {0: 40, 1: 3, 2: 17, 3: 17}  # by slot; the floor lies KEEP before the end
# Slots of decode steps in a row, and whether the floors of the step before are in the buffer already.
STEPS = [
    ([0, 1, 2], False),
    ([0, 1, 2], True),
    ([0, 1], True),
    ([1, 0], False),
    ([1, 0, 2], True),
    ([1, 0, 3], True),  # another request, of the same floor
    ([2, 0, 1], False),
]


def _add(state: ReplayState, slot: int, prompt_len: int) -> None:
    data: Any = SimpleNamespace(prompt_len=prompt_len, num_computed_tokens=0, sampling_params=None)
    state.add_request(slot, data)


def _step(state: ReplayState, slots: list[int]) -> tuple[list[int], int]:
    """Floors of the step's requests as a graph would read them, and how often they were copied."""
    batch: Any = SimpleNamespace(idx_mapping_np=np.array(slots), has_prefill=False, num_tokens=len(slots))
    nothing: Any = None
    with mock.patch.object(replay_state, "async_tensor_h2d", wraps=async_tensor_h2d) as copy:
        inputs = state.inputs(state.plan(batch), batch, nothing, nothing, None, is_graph=True)
    assert inputs.decoder_floors.data_ptr() == state.dummy_inputs().decoder_floors.data_ptr()
    return inputs.decoder_floors[: len(slots)].tolist(), copy.call_count


def _state() -> ReplayState:
    state = ReplayState(ReplayRule(window=4, keep_tokens=KEEP), 4, 3, torch.device("cpu"))
    for slot, length in PROMPTS.items():
        _add(state, slot, length)
    return state


def test_floors_follow_the_requests_and_their_order() -> None:
    state = _state()
    for slots, is_held in STEPS:
        floors, num_copies = _step(state, slots)
        assert floors == [max(PROMPTS[slot] - KEEP, 0) for slot in slots], slots
        assert num_copies == int(not is_held), slots


def test_a_request_that_takes_a_slot_brings_its_floor() -> None:
    state = _state()
    _step(state, [0, 2])
    _add(state, 2, 33)
    assert _step(state, [0, 2]) == ([35, 28], 1)


def test_without_decoder_replay_no_floor_is_ever_copied() -> None:
    state = ReplayState(ReplayRule(window=4), 4, 3, torch.device("cpu"))
    for slot, length in PROMPTS.items():
        _add(state, slot, length)
    assert [_step(state, slots) for slots in ([0, 1, 2], [2, 1])] == [([0, 0, 0], 0), ([0, 0], 0)]
