"""The engines in which faults of verification are planted: one with drafts and one without, for the same probes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.draft_relations import bound_requests, speculative_flag
from deepinfer_determinism.engine import ScheduleResult
from deepinfer_determinism.mutants_drafts import DRAFT_MUTANTS
from deepinfer_determinism.relations import ALONE, Setting, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload, renamed
from deepinfer_plugin.engine_child.plan import Action, Request

DRAFTING = "draft mutants"
PLAIN = f"{DRAFTING} {ALONE}"
CONTROL = "control"
NUM_DRAFTS = 5
NUM_OUTPUTS = 18


def _probes(workload: Workload) -> tuple[Request, ...]:
    """Answers that each fault can change: greedy and drawn, with penalties, and under a grammar."""
    wild: dict[str, Any] = {"temperature": 1.3, "seed": 5, "frequency_penalty": 1.5, "presence_penalty": 1.5}
    return (
        *bound_requests(workload, 4, NUM_OUTPUTS),
        *(workload.neighbour(f"wild{number}", 6 + 15 * number, NUM_OUTPUTS, **wild) for number in range(3)),
        workload.neighbour("greedy", 21, NUM_OUTPUTS),
    )


def draft_mutant_schedules(setting: Setting, workload: Workload) -> list[Schedule]:
    """The probes alone in an engine without drafts, then under each fault in one with drafts."""
    probes = _probes(workload)
    plain = make_schedule(PLAIN, [Action(add=(probe,)) for probe in probes], setting)
    names = (CONTROL, *(mutant.name for mutant in DRAFT_MUTANTS))
    actions = [Action(add=tuple(renamed(probe, name) for probe in probes), reset_prefix_cache=True) for name in names]
    faults = {number: (mutant.fault,) for number, mutant in enumerate(DRAFT_MUTANTS, 1)}
    drafting = replace(setting, flags=(*setting.flags, speculative_flag(NUM_DRAFTS)), drafter="partly")
    made = make_schedule(DRAFTING, actions, drafting)
    return [
        replace(plain, observe=False),
        replace(made, action_faults=faults, observe=False, beside=PLAIN),
    ]


def compare_draft_mutant(name: str, plain: ScheduleResult, drafting: ScheduleResult) -> Comparison:
    """Compare the probes without drafts with the same under a fault."""
    total = Comparison()
    for base, request in plain.schedule.requests.items():
        other = renamed(request, name)
        total += compare_request(
            other.name,
            Given(request=request, result=plain.requests[base]),
            Given(request=other, result=drafting.requests[other.name]),
        )
    return total
