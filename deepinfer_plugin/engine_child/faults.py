"""Planted faults: each breaks one thing that row independence rests on, so that a test can show that it would notice.

A fault is a context manager; what it yields counts how often the changed code ran.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch


@dataclass(slots=True)
class Calls:
    """How often the changed code ran; an observer also says what it saw, numbers by name."""

    calls: int = 0
    seen: dict[str, int] = field(default_factory=dict)


@contextmanager
def row_tiles_off() -> Iterator[Calls]:
    """Multiply all rows of a step at once: the library then chooses its kernel by their number."""
    count = Calls()

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        count.calls += 1
        return x @ w.t()

    operations = ("linear", "moe_experts", "hc_mix")
    with ExitStack() as stack:
        for operation in operations:
            module = importlib.import_module(f"deepinfer_kernels.{operation}.reference")
            stack.enter_context(mock.patch.object(module, "tiled_matmul", product))
        yield count


@contextmanager
def window_short_after_the_first_request(from_position: str = "1") -> Iterator[Calls]:
    """Rows of every request but the first of the batch lose the oldest key of their window, from a position on.

    Works inside a captured graph too: tensors decide, no Python.
    """
    drop = partial(_drop_oldest, int(from_position))
    with _changed("deepinfer_plugin.model.step", "window_slots", drop) as count:
        yield count


@contextmanager
def history_lost_at_chunk_borders() -> Iterator[Calls]:
    """In a chunk of several rows Engram sees only the tokens of that chunk."""
    with _changed("deepinfer_plugin.worker.model_state", "lookback_ids", _forget_history) as count:
        yield count


@contextmanager
def _changed(module: str, name: str, change: Callable[..., torch.Tensor]) -> Iterator[Calls]:
    """Pass the result of a function, and its arguments, through ``change``."""
    count = Calls()
    owner = importlib.import_module(module)
    original = getattr(owner, name)

    def changed(*args: Any) -> torch.Tensor:
        count.calls += 1
        return change(original(*args), *args)

    with mock.patch.object(owner, name, changed):
        yield count


def _drop_oldest(
    from_position: int, slots: torch.Tensor, positions: torch.Tensor, req_idx: torch.Tensor, *rest: Any
) -> torch.Tensor:
    del rest
    is_changed = (req_idx > 0) & (positions >= from_position)
    return torch.cat((slots[:, :1].masked_fill(is_changed[:, None], -1), slots[:, 1:]), dim=1)


def _forget_history(
    ids: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, query_start_loc: torch.Tensor, *rest: Any
) -> torch.Tensor:
    del input_ids, positions, rest
    rows = torch.arange(ids.shape[0])
    ends = query_start_loc[1:]
    req_idx = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp_max_(ends.shape[0] - 1)
    row_in_chunk = rows - query_start_loc[req_idx].long()
    is_chunk = (query_start_loc[req_idx + 1] - query_start_loc[req_idx]) > 1
    shift = torch.arange(1, ids.shape[1] + 1)
    is_lost = is_chunk[:, None] & (shift > row_in_chunk[:, None])
    return torch.where(is_lost, -1, ids)
