"""What watches, and what breaks, an engine that plans several steps ahead; see ``engine_child/faults.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from deepinfer_plugin.engine_child.faults import Calls


@contextmanager
def tokens_in_flight() -> Iterator[Calls]:
    """Sees how many tokens without a result a request had at most, with a grammar and without."""
    count = Calls(seen={"plain": 0, "grammar": 0})

    def watch(request: Any, scheduler: Any) -> None:
        del scheduler
        kind = "grammar" if request.use_structured_output else "plain"
        count.seen[kind] = max(count.seen[kind], request.num_output_placeholders)

    with _behind_a_plan(count, watch):
        yield count


@contextmanager
def grammar_in_every_step() -> Iterator[Calls]:
    """A request with a grammar is planned again before the token of its last step is known."""
    count = Calls()

    def hurry(request: Any, scheduler: Any) -> None:
        request.next_decode_eligible_step = scheduler.current_step + 1

    with _behind_a_plan(count, hurry):
        yield count


@contextmanager
def _behind_a_plan(count: Calls, change: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``change`` with every request of a plan, once the scheduler has done with it."""
    original = AsyncScheduler._update_after_schedule

    def changed(scheduler: Any, scheduler_output: Any) -> None:
        original(scheduler, scheduler_output)
        for name in scheduler_output.num_scheduled_tokens:
            count.calls += 1
            change(scheduler.requests[name], scheduler)

    with mock.patch.object(AsyncScheduler, "_update_after_schedule", changed):
        yield
