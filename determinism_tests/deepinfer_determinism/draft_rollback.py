"""Rollback behind every number of accepted drafts at every position of a page: requests and engines, as data.

Half of the answers are prescribed, so that they depend on no context that a fault could leave alone, and so that later
prompts can repeat them: those hit pages that verified drafts have filled. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfer_determinism.draft_relations import speculative_flag
from deepinfer_determinism.engine import ScheduleResult
from deepinfer_determinism.relations import NO_CACHE, SMALL_BLOCKS, Setting, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Workload, base_name, renamed
from deepinfer_plugin.engine_child.plan import Action, Request
from deepinfer_plugin.settings import Arithmetic

NUM_DRAFTS = 5
PAGE = PAGES[0]
NUM_OUTPUTS, NUM_PRESCRIBED = 68, 66
REPEATED = 2 * PAGE  # tokens of a prescribed answer that a later prompt repeats
NUM_OF_KIND, NUM_FOLLOWERS, NUM_SHORT = 7, 3, 2
SHORT = 24  # outputs of a request under a planted fault
PLAIN, SYSTEMATIC, PREEMPTED = "rollback_off", "rollback", "rollback_preempted"
OBSERVER = "deepinfer_determinism.cache_states:cache_states"
FAULTS: dict[str, str] = {
    "window_keeps_a_rejected_draft": "window",
    "entries_keep_a_rejected_draft": "entries",
    "index_keys_keep_a_rejected_draft": "keys",
    "pair_state_keeps_a_rejected_draft": "pair_state",
}
"""Planted faults, and the kind of cache in which each must show."""

# Without it vLLM keeps windows at the end of a prompt only, and no page of an answer is ever hit.
KEEP_ANSWERS = f"--prefix-cache-retention-interval={PAGE}"
SMALL_POOL = ("--num-gpu-blocks-override=44", f"--max-model-len={5 * PAGE}", "--max-num-batched-tokens=64")


def fault_path(name: str) -> str:
    """Import path of one of ``FAULTS``."""
    return f"deepinfer_determinism.mutants_drafts:{name}"


def observer(name: str) -> str:
    """Import path of an observer of the caches that can be told from others."""
    return f"{OBSERVER}({name})"


def probes(workload: Workload) -> tuple[Request, ...]:
    """Prescribed, greedy and drawn answers; prompts of odd and even lengths around a page."""
    prescribed = []
    for number in range(NUM_OF_KIND):
        tokens = workload.neighbour(f"fixed{number}", 5 + 4 * number).tokens
        forced = workload.neighbour(f"identifier{number}", NUM_PRESCRIBED).tokens
        prescribed.append(Request(name=f"fixed{number}", tokens=tokens, forced=forced, max_tokens=NUM_OUTPUTS))
    kinds: Sequence[Mapping[str, Any]] = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"frequency_penalty": 0.7},
        {"temperature": 1.6, "seed": 4},
    )
    free = [
        workload.neighbour(f"free{number}", 4 + 3 * number, NUM_OUTPUTS, **kinds[number % len(kinds)])
        for number in range(NUM_OF_KIND)
    ]
    return (*prescribed, *free)


def followers(workload: Workload) -> tuple[Request, ...]:
    """Prompts that repeat a prescribed answer, then go on otherwise."""
    found = []
    for number, request in enumerate(probes(workload)[:NUM_FOLLOWERS]):
        tail = workload.neighbour(f"tail{number}", 3 + number).tokens
        tokens = request.tokens + request.forced[:REPEATED] + tail
        found.append(Request(name=f"after{number}", tokens=tokens, max_tokens=9))
    return tuple(found)


def schedules(checkpoint: str, workload: Workload) -> list[Schedule]:
    """Without drafts; with drafts of which every number stands everywhere, then under faults; with preemption."""
    off = Setting(checkpoint=checkpoint, arithmetic=Arithmetic.S32, flags=(SMALL_BLOCKS, KEEP_ANSWERS))
    drafting = replace(off, flags=(*off.flags, speculative_flag(NUM_DRAFTS)), drafter="systematic")
    both = [Action(add=probes(workload)), Action(add=followers(workload))]
    plain = make_schedule(PLAIN, [*both, _short_action(workload, PLAIN)], off, (NO_CACHE,))
    systematic = make_schedule(SYSTEMATIC, [*both, *(_short_action(workload, fault) for fault in FAULTS)], drafting)
    observers = dict.fromkeys(range(len(both)), (observer(SYSTEMATIC),))
    planted = {len(both) + number: (observer(fault), fault_path(fault)) for number, fault in enumerate(FAULTS)}
    half = Action(add=probes(workload)[:NUM_OF_KIND])
    preempted = make_schedule(PREEMPTED, [half, both[1]], drafting, SMALL_POOL)
    return [
        _observed(plain),
        replace(systematic, action_faults={**observers, **planted}, observe=False, beside=PLAIN),
        replace(_observed(preempted), beside=PLAIN),
    ]


def _observed(schedule: Schedule) -> Schedule:
    return replace(schedule, observe=False, run=replace(schedule.run, faults=(observer(schedule.name),)))


def short_probes(workload: Workload) -> tuple[Request, ...]:
    """Requests with shorter answers, for faults; the first half of an answer is prescribed."""
    return tuple(
        replace(probe, name=f"short_{probe.name}", forced=probe.forced[: SHORT // 2], max_tokens=SHORT)
        for probe in probes(workload)[:NUM_SHORT]
    )


def _short_action(workload: Workload, name: str) -> Action:
    return Action(add=tuple(renamed(probe, name) for probe in short_probes(workload)), reset_prefix_cache=True)


def accepted_at(result: ScheduleResult, num_drafts: int) -> dict[tuple[int, int], int]:
    """How often so many of all ``num_drafts`` drafts were accepted behind so many tokens of a request.

    Keys are (tokens, accepted), from how many tokens each step computed and how many it brought, for requests that run
    without a fault. The last step of a request does not count: what is beyond its length is cut off.
    """
    found: dict[tuple[int, int], int] = {}
    for name, request in result.schedule.requests.items():
        facts = result.requests[name].facts
        if name != base_name(name) or facts.num_preemptions > 0:
            continue
        (chunks,), (produced,) = facts.chunks, facts.produced
        length = len(request.tokens) + produced[0]
        verifying = chunks[len(chunks) - len(produced) + 1 :]
        for computed, brought in zip(verifying[:-1], produced[1:-1], strict=True):
            if computed == num_drafts + 1:
                found[length, brought - 1] = found.get((length, brought - 1), 0) + 1
            length += brought
    return found


def missing_pairs(counts: Sequence[tuple[int, int]], period: int, num_drafts: int) -> list[tuple[int, int]]:
    """Pairs of position modulo ``period`` and number of accepted drafts that did not occur."""
    seen = {(length % period, accepted) for length, accepted in counts}
    return [pair for pair in itertools.product(range(period), range(num_drafts + 1)) if pair not in seen]
