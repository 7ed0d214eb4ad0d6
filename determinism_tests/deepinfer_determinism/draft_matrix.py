"""Drafts x schedule of verification x greedy or drawn x chunks, hits, preemption and grammars, as data.

One engine a combination of drafts and schedule, in which every circumstance is an action, and one in a small pool for
preemption. All are compared with one engine that has no drafts, no cache, no chunks and room for everything. Loads
neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_determinism.relations import ASYNC_SCHEDULING, NO_CACHE, SMALL_BLOCKS, Setting, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Workload, base_name, renamed
from deepinfer_plugin.engine_child.plan import KNOW_ANSWERS, Action, Request
from deepinfer_plugin.replay.settings import KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

CHUNKED, HIT, PREEMPTED, STRUCTURED = CIRCUMSTANCES = ("chunked", "hit", "preempted", "structured")
GREEDY, SAMPLED = KINDS = ("greedy", "sampled")
FIXED, RANDOM, CONFIDENCE = "fixed", "random", "confidence"
SMALL_POOL = "--num-gpu-blocks-override=60"  # the prompts of most requests fit, the answers do not
LENGTHS: Mapping[str, str | None] = {FIXED: None, RANDOM: "random", CONFIDENCE: "confidence"}
PLAIN = "matrix plain"

BUDGET, MOST_AT_ONCE = 61, 10  # rows of a step: all drafts of all requests, and hardly any prompt beside them
LONGEST = 224
KEEP_ALL = f"--prefix-cache-retention-interval={PAGES[0]}"  # else vLLM keeps windows at the end of a prompt only
FLAGS = (SMALL_BLOCKS, KEEP_ALL, f"--max-model-len={LONGEST}")
CROWDED = (f"--max-num-batched-tokens={BUDGET}", f"--max-num-seqs={MOST_AT_ONCE}")
REPLAY = {MODE_VARIABLE: "compact", KEEP_VARIABLE: "20"}  # fewer rows than a prompt has, as with long prompts served
FREE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    GREEDY: ({}, {"frequency_penalty": 0.5}),
    SAMPLED: ({"temperature": 1.0, "seed": 21}, {"temperature": 0.8, "seed": 22, "top_k": 40, "top_p": 0.95}),
}
GRAMMARS = ("[ -~]{90,400}", "[!-Z]{90,400}")  # wide enough for drafts that know no grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One engine: drafts a step, how many of them are verified, and who makes them, None: the checkpoint's blocks."""

    num_drafts: int
    schedule: str = FIXED
    drafter: str | None = None

    @property
    def name(self) -> str:
        """Of its schedule in a session."""
        if self.num_drafts == 0:
            return "matrix no drafts"
        return f"matrix {self.num_drafts} drafts {self.schedule} {self.drafter or 'blocks'}"

    @property
    def preempted_name(self) -> str:
        """Of the schedule in a small pool of blocks."""
        return f"{self.name} {PREEMPTED}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is generated: requests of each kind in a circumstance, and tokens of each."""

    num_requests: int
    num_outputs: int
    circumstances: tuple[str, ...]
    combinations: tuple[Combination, ...]


_ALL = tuple(
    Combination(num_drafts=count, schedule=schedule) for count in (5, 3, 1) for schedule in (FIXED, RANDOM, CONFIDENCE)
)
SIZES: Mapping[str, Size] = {
    "quick": Size(
        num_requests=2,
        num_outputs=14,
        circumstances=(CHUNKED, HIT, STRUCTURED),  # preemption: draft_relations.py and draft_rollback.py
        combinations=(
            Combination(num_drafts=5, schedule=RANDOM),
            Combination(num_drafts=3, schedule=CONFIDENCE),
        ),
    ),
    "full": Size(
        num_requests=4,
        num_outputs=72,
        circumstances=CIRCUMSTANCES,
        combinations=(
            Combination(num_drafts=0),
            *_ALL,
            Combination(num_drafts=5, schedule=RANDOM, drafter="partly"),
        ),
    ),
}


def free_requests(workload: Workload, size: Size) -> tuple[Request, ...]:
    """Prompts longer than a step, greedy and drawn in turn."""
    found = []
    for number in range(size.num_requests):
        for place, (kind, sampling) in enumerate(FREE.items()):
            length = BUDGET + 3 + 7 * number + 3 * place
            parameters = sampling[number % len(sampling)]
            found.append(workload.neighbour(f"{kind}{number}", length, size.num_outputs, **parameters))
    return tuple(found)


def bound_requests(workload: Workload, size: Size) -> tuple[Request, ...]:
    """Answers that a grammar binds, greedy and drawn in turn."""
    found = []
    for number in range(size.num_requests):
        for place, (kind, sampling) in enumerate(FREE.items()):
            parameters = {**sampling[0], "structured_outputs": {"regex": GRAMMARS[number % len(GRAMMARS)]}}
            length = 9 + 5 * number + place
            found.append(
                workload.neighbour(f"{kind}_bound{number}", length, size.num_outputs, **parameters, ignore_eos=False)
            )
    return tuple(found)


def kind_of(name: str) -> str:
    """Greedy or sampled, from the name of a request."""
    return next(kind for kind in KINDS if name.startswith(kind))


def circumstance_of(name: str) -> str:
    """The circumstance of a request, from its name."""
    return name.partition("@")[2]


def compared(schedule: Schedule) -> tuple[Request, ...]:
    """The requests of an engine whose rows count."""
    return tuple(request for name, request in schedule.requests.items() if base_name(name) != name)


def matrix_schedules(checkpoint: str, workload: Workload, depth: str) -> list[Schedule]:
    """The plain engine, then one a combination.

    Args:
        checkpoint: folder of a checkpoint whose own drafts are right and wrong by turns.
        workload: makes the prompts.
        depth: ``quick`` or ``full``.
    """
    size = SIZES[depth]
    setting = Setting(checkpoint=checkpoint, arithmetic=Arithmetic.S32, flags=FLAGS, variables=REPLAY)
    everything = (*free_requests(workload, size), *bound_requests(workload, size))
    found = [make_schedule(PLAIN, [Action(add=everything)], setting, (NO_CACHE,))]
    for combination in size.combinations:
        drafts = [_drafts_flag(combination.num_drafts)] if combination.num_drafts > 0 else []
        drafting = replace(
            setting,
            flags=(*FLAGS, *ASYNC_SCHEDULING, *drafts),  # a step ahead, as on a GPU
            drafter=combination.drafter,
            lengths=LENGTHS[combination.schedule],
        )
        made = [make_schedule(combination.name, _actions(workload, size), drafting, CROWDED)]
        if PREEMPTED in size.circumstances:
            again = Action(add=_named(free_requests(workload, size), PREEMPTED))
            made.append(make_schedule(combination.preempted_name, [again], drafting, (*CROWDED, SMALL_POOL)))
        beside = PLAIN if combination.drafter in KNOW_ANSWERS else ""
        found += [replace(schedule, beside=beside) for schedule in made]
    return [replace(schedule, observe=False) for schedule in found]


def _actions(workload: Workload, size: Size) -> list[Action]:
    """Chunked prompts; the same again, which hit; answers under grammars."""
    free, bound = free_requests(workload, size), bound_requests(workload, size)
    return [
        Action(add=_named(free, CHUNKED)),
        Action(add=_named(free, HIT)),
        Action(add=_named(bound, STRUCTURED)),
    ]


def _named(requests: Sequence[Request], circumstance: str) -> tuple[Request, ...]:
    return tuple(renamed(request, circumstance) for request in requests)


def _drafts_flag(count: int) -> str:
    return f"--speculative-config={json.dumps({'method': 'dspark', 'num_speculative_tokens': count})}"
