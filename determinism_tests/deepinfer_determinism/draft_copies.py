"""Answers that copy long random identifiers out of their prompt, with n-gram drafts that propose the copy.

Weights that are random copy nothing, so the identifiers of an answer are prescribed, in another order than the prompt
has; what follows them is free. Each verified row still says what the model makes of the copy so far. At the end of an
identifier the drafts run on into what stands there in the prompt, and are rejected. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer_determinism.draft_relations import speculative_flag
from deepinfer_determinism.relations import NO_CACHE, SMALL_BLOCKS, Setting, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload, renamed
from deepinfer_plugin.engine_child.plan import Action, Request
from deepinfer_plugin.settings import Arithmetic

NUM_DRAFTS = 5
IDENTIFIER = 24  # tokens, beyond many windows
ORDERS = ((2, 0, 1), (1, 2, 0))
NUM_FREE = 6  # tokens behind the copies
PLAIN, COPYING = "copies off", "copies"
CONTROL, FAULT = "control", "stale"
STALE = "deepinfer_determinism.mutants_drafts:window_keeps_a_rejected_draft"
DRAWN = {"temperature": 1.0, "seed": 17}


def probes(workload: Workload) -> tuple[Request, ...]:
    """One request an order, each with identifiers of its own; every second one is drawn where it is free."""
    found = []
    for number, order in enumerate(ORDERS):
        identifiers = [workload.neighbour(f"id {number} {place}", IDENTIFIER).tokens for place in range(len(order))]
        marks = workload.neighbour(f"marks {number}", len(order) + 1).tokens
        prompt = marks[:1]
        for mark, identifier in zip(marks[1:], identifiers, strict=True):
            prompt += (*identifier, mark)
        forced = tuple(token for place in order for token in identifiers[place])
        found.append(
            Request(
                name=f"copy{number}",
                tokens=prompt,
                forced=forced,
                max_tokens=len(forced) + NUM_FREE,
                sampling=DRAWN if number % 2 else {},
            )
        )
    return tuple(found)


def schedules(checkpoint: str, workload: Workload) -> list[Schedule]:
    """The copies without drafts, then with drafts, then with drafts and the planted fault."""
    off = Setting(checkpoint=checkpoint, arithmetic=Arithmetic.S32, flags=(SMALL_BLOCKS,))
    on = replace(off, flags=(*off.flags, speculative_flag(NUM_DRAFTS)))
    wanted = probes(workload)
    again = [
        Action(add=tuple(renamed(probe, name) for probe in wanted), reset_prefix_cache=True)
        for name in (CONTROL, FAULT)
    ]
    plain = make_schedule(PLAIN, [Action(add=wanted)], off, (NO_CACHE,))
    copying = replace(make_schedule(COPYING, again, on), action_faults={1: (STALE,)})
    return [replace(plain, observe=False), replace(copying, observe=False)]
