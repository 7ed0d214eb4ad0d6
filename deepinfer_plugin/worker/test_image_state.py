"""How far n-grams reach back, for rows whose place the host knows only from above."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_plugin.worker.image_state import STEPS_IN_FLIGHT, ImageState

DEPTH, NUM_DRAFTS = 3, 5
SPAN = (9, 4)  # offset and length: the text behind it begins at 13


def _state(num_drafts: int) -> ImageState:
    state = ImageState(32, DEPTH, torch.device("cpu"), num_drafts)
    place: Any = SimpleNamespace(mm_position=SimpleNamespace(offset=SPAN[0], length=SPAN[1]))
    data: Any = SimpleNamespace(mm_features=[place])
    state.add_request(0, data)
    return state


def _step(start: int, count: int) -> Any:
    """One request, as the host sees it."""
    return SimpleNamespace(
        num_tokens_after_padding=count,
        idx_mapping_np=np.array([0]),
        num_computed_tokens_np=np.array([start]),
        num_scheduled_tokens=np.array([count]),
        query_start_loc_np=np.array([0, count]),
    )


@pytest.mark.parametrize("ahead", range(STEPS_IN_FLIGHT * NUM_DRAFTS + 1))
@pytest.mark.parametrize("start", range(13, 20))
def test_no_row_looks_into_an_image_however_far_ahead_the_host_counts(start: int, ahead: int) -> None:
    """With drafts and asynchronous scheduling the host has counted drafts of the steps in flight that did not stand."""
    count = NUM_DRAFTS + 1
    positions = torch.arange(start, start + count)
    lookback = positions[:, None] - torch.arange(1, DEPTH + 1)  # the id of a token is its position
    rows = _state(NUM_DRAFTS).rows(_step(start + ahead, count))
    assert not rows.is_image.any()
    assert rows.block(lookback, positions).tolist() == lookback.masked_fill(lookback < 13, -1).tolist()


def test_without_drafts_a_row_beyond_the_reach_of_an_image_costs_nothing() -> None:
    assert _state(0).rows(_step(16, 1)).text_starts is None
    assert _state(0).rows(_step(15, 1)).text_starts is not None
