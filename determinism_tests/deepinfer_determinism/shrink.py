"""Smaller pairs of schedules that still part: fewer requests, then shorter prompts, then fewer outputs and actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deepinfer_determinism.replay import Pair
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import base_name
from deepinfer_plugin.engine_child.plan import Action, Request

Test = Callable[[Sequence[Pair]], list[bool]]  # which of the pairs part; asked for several at once
BATCH = 24  # pairs tried in one pair of engines
ENGINES_PER_BATCH = 2


@dataclass(slots=True)
class Budget:
    """Engines that may be started."""

    engines: int
    spent: int = 0

    def first(self, candidates: Sequence[Pair], test: Test) -> Pair | None:
        """The first candidate that parts, as far as the budget reaches."""
        for start in range(0, len(candidates), BATCH):
            if self.spent + ENGINES_PER_BATCH > self.engines:
                return None
            self.spent += ENGINES_PER_BATCH
            batch = candidates[start : start + BATCH]
            for candidate, parts in zip(batch, test(batch), strict=True):
                if parts:
                    return candidate
        return None


def shrink(pair: Pair, target: str, test: Test, budget: Budget) -> Iterator[Pair]:
    """Every smaller pair found on the way; the last is the smallest.

    Args:
        pair: parts at the request ``target``; is not yielded itself.
        target: base name of the request that every smaller pair keeps.
        test: tells which pairs part.
        budget: of engines.
    """
    for stage in (_fewer_requests, _shorter_prompts, _fewer_outputs, _fewer_actions):
        for smaller in stage(pair, target, test, budget):
            pair = smaller
            yield pair


def chained(schedules: Sequence[Schedule], name: str) -> tuple[Schedule, list[Mapping[str, str]]]:
    """Schedules of one engine after each other in it, each with an empty prefix cache.

    Returns:
        The schedule, and for each part the new name of each of its requests.
    """
    actions: list[Action] = []
    faults: dict[int, tuple[str, ...]] = {}
    names: list[Mapping[str, str]] = []
    for number, schedule in enumerate(schedules):
        renamed = {request: f"{number}.{request}" for request in schedule.requests}
        faults |= {len(actions) + index: paths for index, paths in schedule.action_faults.items()}
        for action in schedule.run.actions:
            add = tuple(replace(request, name=renamed[request.name]) for request in action.add)
            actions.append(replace(action, add=add, abort=tuple(renamed[request] for request in action.abort)))
        actions += [Action(abort=tuple(renamed.values())), Action(reset_prefix_cache=True)]
        names.append(renamed)
    run = replace(schedules[0].run, name=name, actions=tuple(actions))
    return replace(schedules[0], run=run, action_faults=faults), names


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


def _fewer_requests(pair: Pair, target: str, test: Test, budget: Budget) -> Iterator[Pair]:
    """Delta debugging on the others: none of them, parts, all but a part; the smallest that parts, until none does."""
    while others := [name for name in _names(pair) if name != target]:
        kept: dict[frozenset[str], None] = {frozenset(): None}
        num_parts = 2
        while num_parts < 2 * len(others):
            size = -(-len(others) // min(num_parts, len(others)))
            for start in range(0, len(others), size):
                part = frozenset(others[start : start + size])
                kept |= {part: None, frozenset(others) - part: None}
            num_parts *= 2
        smallest_first = sorted(kept, key=len)
        candidates = [keep_requests(pair, names | {target}) for names in smallest_first if len(names) < len(others)]
        found = budget.first(candidates, test)
        if found is None:
            return
        pair = found
        yield pair


def _shorter_prompts(pair: Pair, target: str, test: Test, budget: Budget) -> Iterator[Pair]:
    """Cut prompts at their ends: all of them alike, then each, to the shortest that parts."""
    longest = max(len(_request(pair, name).tokens) for name in _names(pair))
    for smaller in _least(longest, partial(_all_cut, pair), test, budget):
        pair = smaller
        yield pair
    for name in sorted(_names(pair), key=lambda name: -len(_request(pair, name).tokens)):
        count = len(_request(pair, name).tokens)
        for smaller in _least(count, partial(_one_cut, pair, name), test, budget):
            pair = smaller
            yield pair


def _least(count: int, make: Callable[[int], Pair], test: Test, budget: Budget) -> Iterator[Pair]:
    """Pairs with ever smaller numbers below ``count``, found by dividing the range into as many parts as a batch holds.

    It reaches the smallest number that parts where every larger one parts too.
    """
    fails, parts = 0, count
    while parts - fails > 1:
        step = -(-(parts - fails) // (BATCH + 1))
        numbers = list(range(fails + step, parts, step)) or [fails + 1]
        made = {number: make(number) for number in numbers}
        found = budget.first(list(made.values()), test)
        if found is None:
            if step == 1:
                return
            fails = numbers[-1]
            continue
        parts = next(number for number, candidate in made.items() if candidate is found)
        fails = max([fails, *(number for number in numbers if number < parts)])
        yield found


def _all_cut(pair: Pair, length: int) -> Pair:
    for name in _names(pair):
        pair = change_request(pair, name, _cut(length))
    return pair


def _one_cut(pair: Pair, name: str, length: int) -> Pair:
    return change_request(pair, name, _cut(length))


def _with_outputs(pair: Pair, name: str, count: int) -> Pair:
    return change_request(pair, name, _outputs(count))


def _cut(length: int) -> Callable[[Request], Request]:
    return lambda request: replace(request, tokens=request.tokens[:length])


def _fewer_outputs(pair: Pair, target: str, test: Test, budget: Budget) -> Iterator[Pair]:
    """First one output for every request, then fewer for each."""
    names = _names(pair)
    least = pair
    for name in names:
        least = change_request(least, name, _outputs(1))
    if any(_num_outputs(_request(pair, name)) > 1 for name in names):
        found = budget.first([least], test)
        if found is not None:
            yield found
            return
    for name in names:
        count = _num_outputs(_request(pair, name))
        for smaller in _least(count, partial(_with_outputs, pair, name), test, budget):
            pair = smaller
            yield pair


def _num_outputs(request: Request) -> int:
    return len(request.forced) + 1 if request.max_tokens is None else request.max_tokens


def _outputs(count: int) -> Callable[[Request], Request]:
    return lambda request: replace(request, forced=request.forced[: max(count - 1, 0)], max_tokens=count)


def _fewer_actions(pair: Pair, target: str, test: Test, budget: Budget) -> Iterator[Pair]:
    """Drop actions that add nothing, or join two, until nothing gets smaller."""
    while True:
        candidates = [Pair(a=_without_empty(pair.a), b=_without_empty(pair.b))]
        for index in range(max(len(schedule.run.actions) for schedule in (pair.a, pair.b))):
            candidates.append(Pair(a=_merged(pair.a, index), b=_merged(pair.b, index)))
        here = Pair(a=pair.a, b=pair.b)
        found = budget.first([candidate for candidate in candidates if candidate != here], test)
        if found is None:
            return
        pair = found
        yield pair


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
