"""Parameters of rows are those of their requests in every step, and gathered only where something has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.sampling.row_parameters import RowParameters, divisor, is_drawn

NUM_SLOTS = 6


def _source(seed: int = 0) -> Any:
    values = torch.rand(NUM_SLOTS, generator=torch.Generator().manual_seed(seed)).masked_fill(
        torch.arange(NUM_SLOTS) % 3 == 0, 0.0
    )
    return SimpleNamespace(gpu=values)


def _begin(parameters: RowParameters, slots: list[int]) -> None:
    idx_mapping = torch.tensor(slots)
    parameters.begin(idx_mapping, idx_mapping, np.array(slots))


def test_the_rows_of_the_step_before_are_not_gathered_again() -> None:
    parameters, source = RowParameters(), _source()
    _begin(parameters, [4, 1, 3])
    first = parameters.of(source), parameters.of(source, is_drawn)
    _begin(parameters, [4, 1, 3])
    assert parameters.of(source) is first[0]
    assert parameters.of(source, is_drawn) is first[1]


@pytest.mark.parametrize("slots", [[3, 1, 4], [4, 1], [4, 1, 3, 0], [4, 1, 0]])
def test_other_requests_or_another_order_are_gathered(slots: list[int]) -> None:
    parameters, source = RowParameters(), _source()
    _begin(parameters, [4, 1, 3])
    parameters.of(source)
    _begin(parameters, slots)
    assert_bitwise_equal(parameters.of(source), source.gpu[slots], label=str(slots))


def test_parameters_that_were_stored_meanwhile_are_gathered() -> None:
    parameters, source, other = RowParameters(), _source(), _source(7)
    _begin(parameters, [4, 1, 3])
    parameters.of(source)
    kept = parameters.of(other)
    source.gpu = _source(1).gpu  # vLLM hands on another buffer
    _begin(parameters, [4, 1, 3])
    assert_bitwise_equal(parameters.of(source), source.gpu[[4, 1, 3]], label="another buffer")
    assert parameters.of(other) is kept


def test_the_order_of_a_buffer_that_the_caller_reuses_is_remembered() -> None:
    parameters, source, slots = RowParameters(), _source(), np.array([4, 1, 3])
    for order in ([4, 1, 3], [1, 4, 3]):
        slots[:] = order
        idx_mapping = torch.from_numpy(slots.copy())
        parameters.begin(idx_mapping, idx_mapping, slots)
        assert_bitwise_equal(parameters.of(source), source.gpu[order], label=str(order))


def test_rows_of_drafts_are_gathered_in_every_step() -> None:
    parameters, source, idx_mapping = RowParameters(), _source(), torch.tensor([2, 5])
    for rows in ([2, 2, 5], [2, 5, 5]):  # the device alone knows how many drafts a request keeps
        parameters.begin(torch.tensor(rows), idx_mapping, np.array([2, 5]))
        assert_bitwise_equal(parameters.of(source), source.gpu[rows], label=str(rows))
    _begin(parameters, [2, 5])
    assert_bitwise_equal(parameters.of(source), source.gpu[[2, 5]], label="no drafts again")


def test_a_greedy_row_takes_no_noise_and_keeps_its_logits() -> None:
    source: Any = SimpleNamespace(gpu=torch.tensor([0.0, 0.5, 1.0]))
    parameters = RowParameters()
    _begin(parameters, [0, 1, 2])
    assert parameters.of(source, is_drawn).tolist() == [0.0, 1.0, 1.0]
    assert parameters.of(source, divisor).tolist() == [[1.0], [0.5], [1.0]]
