"""Planted faults of scheduled verification, each a context manager that yields ``Calls``, for ``EngineRun.faults``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from deepinfer_plugin import variables
from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative import schedule
from deepinfer_plugin.speculative.schedule import Confidences

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput


@contextmanager
def rows_of_cut_drafts_count() -> Iterator[Calls]:
    """A cut request keeps the rows of its drafts: the runner then takes them for computed tokens."""
    count, original = Calls(), schedule.cut_output

    def cut(output: SchedulerOutput, kept: Mapping[str, int]) -> SchedulerOutput:
        count.calls += 1
        found = original(output, kept)
        return replace(
            found,
            num_scheduled_tokens=output.num_scheduled_tokens,
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
        )

    with mock.patch.object(schedule, "cut_output", cut):
        yield count


@contextmanager
def stored_rows_become_expensive() -> Iterator[Calls]:
    """The next engine reads times with which hardly a draft is worth its row, however fast this machine is."""
    count, folder = Calls(), Settings.from_envs()[variables.DECODE_PERF_CACHE_DIR]
    assert folder is not None, "faults: no folder of stored times, expected DEEPINFER_DECODE_PERF_CACHE_DIR"
    for path in folder.glob("*.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        value["times_s"] = [expensive_s(rows) for rows in value["rows"]]
        path.write_text(json.dumps(value), encoding="utf-8")
        count.calls += 1
    yield count


def expensive_s(rows: int) -> float:
    """Seconds of ``stored_rows_become_expensive``."""
    return 1e4 + 1e3 * rows


@contextmanager
def confidences_of_a_neighbour() -> Iterator[Calls]:
    """Requests are judged by each other's drafts: harmless to answers."""
    count, original = Calls(), Confidences.of

    def of(self: Confidences, requests: Sequence[str]) -> NDArray[np.float32]:
        count.calls += len(requests) > 1
        return np.roll(original(self, requests), 1, axis=0)

    with mock.patch.object(Confidences, "of", of):
        yield count
