"""Smaller pairs of schedules that still part: fewer requests, then shorter prompts, then fewer outputs and actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deepinfer_determinism.replay import Pair
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import base_name
from deepinfer_plugin.engine_child.plan import Action, Request

Test = Callable[[Sequence[Pair]], list[bool]]  # which of the pairs part; asked for several at once
BATCH = 6  # pairs tried in one child, so that its start is paid once


@dataclass(slots=True)
class Budget:
    """Engines that may be started."""

    engines: int
    spent: int = 0

    @property
    def is_spent(self) -> bool:
        return self.spent + 2 > self.engines

    def first(self, candidates: Sequence[Pair], test: Test) -> Pair | None:
        """The first candidate that parts, as far as the budget reaches."""
        for start in range(0, len(candidates), BATCH):
            batch = candidates[start : start + min(BATCH, (self.engines - self.spent) // 2)]
            if self.is_spent or not batch:
                return None
            self.spent += 2 * len(batch)
            for candidate, parts in zip(batch, test(batch), strict=True):
                if parts:
                    return candidate
        return None


def shrink(pair: Pair, test: Test, budget: Budget) -> Iterator[Pair]:
    """Every smaller pair found on the way; the last is the smallest. ``pair`` itself parts and is not yielded."""
    for stage in (_fewer_requests, _shorter_prompts, _fewer_outputs, _fewer_actions):
        for smaller in stage(pair, test, budget):
            pair = smaller
            yield pair


def keep_requests(pair: Pair, names: frozenset[str]) -> Pair:
    """Both schedules with these requests only; a name stands for its repetitions too."""

    def is_kept(name: str) -> bool:
        return name in names or base_name(name) in names

    def kept(schedule: Schedule) -> Schedule:
        actions = tuple(
            replace(
                action,
                add=tuple(request for request in action.add if is_kept(request.name)),
                abort=tuple(name for name in action.abort if is_kept(name)),
            )
            for action in schedule.run.actions
        )
        return replace(schedule, run=replace(schedule.run, actions=actions))

    return Pair(a=kept(pair.a), b=kept(pair.b))


def change_request(pair: Pair, name: str, change: Callable[[Request], Request]) -> Pair:
    """Both schedules with one request changed, its repetitions too."""

    def changed(schedule: Schedule) -> Schedule:
        actions = tuple(
            replace(action, add=tuple(change(r) if base_name(r.name) == name else r for r in action.add))
            for action in schedule.run.actions
        )
        return replace(schedule, run=replace(schedule.run, actions=actions))

    return Pair(a=changed(pair.a), b=changed(pair.b))


def _names(pair: Pair) -> list[str]:
    """Requests without their repetitions."""
    return list(dict.fromkeys(base_name(name) for name in (*pair.a.requests, *pair.b.requests)))


def _fewer_requests(pair: Pair, test: Test, budget: Budget) -> Iterator[Pair]:
    """Delta debugging: keep one part, else drop one part, else cut finer."""
    num_parts = 2
    while len(names := _names(pair)) > 1 and not budget.is_spent:
        num_parts = min(num_parts, len(names))
        size = -(-len(names) // num_parts)
        parts = [frozenset(names[start : start + size]) for start in range(0, len(names), size)]
        rests = [frozenset(names) - part for part in parts] if len(parts) > 2 else []
        candidates = [keep_requests(pair, part) for part in (*parts, *rests) if part]
        found = budget.first([candidate for candidate in candidates if candidate.shared], test)
        if found is not None:
            num_parts = max(2, num_parts - 1) if len(_names(found)) > size else 2
            pair = found
            yield pair
        elif num_parts < len(names):
            num_parts = 2 * num_parts
        else:
            return


def _shorter_prompts(pair: Pair, test: Test, budget: Budget) -> Iterator[Pair]:
    """Cut each prompt at its end to the shortest of some lengths, until none gets shorter."""
    for name in sorted(_names(pair), key=lambda name: -len(_request(pair, name).tokens)):
        while True:
            length = len(_request(pair, name).tokens)
            lengths = sorted({1, length // 4, length // 2, 3 * length // 4, length - 1} - {0, length})
            candidates = [change_request(pair, name, _cut(count)) for count in lengths if 0 < count < length]
            found = budget.first(candidates, test)
            if found is None:
                break
            pair = found
            yield pair


def _cut(length: int) -> Callable[[Request], Request]:
    return lambda request: replace(request, tokens=request.tokens[:length])


def _fewer_outputs(pair: Pair, test: Test, budget: Budget) -> Iterator[Pair]:
    for name in _names(pair):
        while True:
            total = _num_outputs(_request(pair, name))
            counts = sorted({1, total // 4, total // 2, total - 1} - {0, total})
            candidates = [change_request(pair, name, _outputs(count)) for count in counts if 0 < count < total]
            found = budget.first(candidates, test)
            if found is None:
                break
            pair = found
            yield pair


def _num_outputs(request: Request) -> int:
    return len(request.forced) + 1 if request.max_tokens is None else request.max_tokens


def _outputs(count: int) -> Callable[[Request], Request]:
    return lambda request: replace(request, forced=request.forced[: max(count - 1, 0)], max_tokens=count)


def _fewer_actions(pair: Pair, test: Test, budget: Budget) -> Iterator[Pair]:
    """Drop actions that add nothing, all at once or one by one, and bounds on steps."""
    emptied = Pair(a=_without_empty(pair.a), b=_without_empty(pair.b))
    candidates = [] if emptied == pair else [emptied]
    for index in range(max(len(schedule.run.actions) for schedule in (pair.a, pair.b))):
        candidates.append(Pair(a=_merged(pair.a, index), b=_merged(pair.b, index)))
    found = budget.first([candidate for candidate in candidates if candidate != pair], test)
    if found is not None:
        yield found
        yield from _fewer_actions(found, test, budget)


def _without_empty(schedule: Schedule) -> Schedule:
    if schedule.action_faults:
        return schedule  # they are counted by number of action
    actions = tuple(
        action for action in schedule.run.actions if action.add or action.abort or action.reset_prefix_cache
    )
    return replace(schedule, run=replace(schedule.run, actions=actions))


def _merged(schedule: Schedule, index: int) -> Schedule:
    """Action ``index`` joined with the next one: its requests are added at once with those of the next."""
    actions = schedule.run.actions
    if schedule.action_faults or index + 1 >= len(actions):
        return schedule
    first, second = actions[index], actions[index + 1]
    if second.reset_prefix_cache or any(name in second.abort for name in (r.name for r in first.add)):
        return schedule
    joined = Action(
        add=(*first.add, *second.add),
        abort=(*first.abort, *second.abort),
        reset_prefix_cache=first.reset_prefix_cache,
        steps=second.steps,
    )
    run = replace(schedule.run, actions=(*actions[:index], joined, *actions[index + 2 :]))
    return replace(schedule, run=run)


def _request(pair: Pair, name: str) -> Request:
    return next(
        request
        for schedule in (pair.a, pair.b)
        for request in schedule.requests.values()
        if base_name(request.name) == name
    )
