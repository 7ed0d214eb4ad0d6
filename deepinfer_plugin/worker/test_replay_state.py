"""Floors of the step's requests are in their buffer, written only where they differ; ids of encoder passes."""

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


def test_a_run_that_measures_memory_may_have_requests_longer_than_the_history() -> None:
    """vLLM's profile run has so many tokens in so few requests: on a GPU it ended with an assertion of the device."""
    max_model_len, num_tokens, segment = 24, 60, 16
    state = ReplayState(ReplayRule(window=4, segment=segment), 1, 3, torch.device("cpu"))
    ids = torch.arange(100, 100 + num_tokens, dtype=torch.int32)
    batch: Any = SimpleNamespace(
        idx_mapping_np=np.array([0]),
        has_prefill=True,
        num_tokens=num_tokens,
        num_computed_tokens_np=np.array([0]),
        num_scheduled_tokens=np.array([num_tokens]),
        input_ids=ids,
    )
    history: Any = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=ids[None, :max_model_len]))
    lookback = torch.full((num_tokens, 3), 7)
    inputs = state.inputs(state.plan(batch), batch, history, lookback, None, is_graph=False)
    assert len(inputs.encoder_passes) == -(-num_tokens // segment)
    for one in inputs.encoder_passes:
        own = one.source_rows >= 0
        assert one.input_ids[own].tolist() == (100 + one.positions[own]).tolist()
        assert bool((one.lookback_ids[own] == 7).all())
        is_known = ~own & (one.positions < max_model_len)
        assert one.input_ids[is_known].tolist() == (100 + one.positions[is_known]).tolist()
    assert any(bool((one.source_rows < 0).any()) for one in inputs.encoder_passes)
