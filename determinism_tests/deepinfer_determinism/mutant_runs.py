"""Engines for the mutants: few engines, many faults in each, every fault in force for its own actions only.

Under its fault a mutant runs probes alone, then the same probes under the change of one relation; the harness has
caught it when these differ. A control without fault runs the same actions in every engine and must not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.draft_mutant_runs import draft_mutant_schedules
from deepinfer_determinism.engine import ScheduleResult, checkpoint_folder
from deepinfer_determinism.harness import Options
from deepinfer_determinism.image_mutant_runs import image_mutant_schedule
from deepinfer_determinism.mutants import Mutant
from deepinfer_determinism.mutants_engine import ENGINE_MUTANTS
from deepinfer_determinism.relations import NO_CACHE, SMALL_BLOCKS, Setting, few_blocks, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Sizes, Workload
from deepinfer_plugin.engine_child.plan import Action, Request
from deepinfer_plugin.settings import Arithmetic

CONTROL = "control"
Probes = tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stress:
    """One engine, and what its mutants run through.

    Attributes:
        flags: of the engine.
        changed: actions that repeat the probes under the changed circumstances, from probes and workload.
        has_few_blocks: the cache holds one long request and little more.
        outputs: output tokens of every probe.
        sampling: parameters of all probes, beside their own.
        arithmetic: in s32 no rounding hides the order of a sum; in ref, what is served, nearly every one does.
    """

    flags: tuple[str, ...]
    changed: Callable[[Probes, Workload], Sequence[Action]]
    has_few_blocks: bool = False
    outputs: int = 4
    sampling: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: Arithmetic = Arithmetic.REF


def _probes(workload: Workload, stress: Stress) -> Probes:
    """Greedy and drawn, short and long, with and without prompt rows."""
    outputs = stress.outputs
    probes = (
        workload.neighbour("a", 9, outputs, temperature=1.0, seed=5),
        replace(workload.neighbour("b", 30, outputs), prompt_rows=True),
        workload.neighbour("c", 33, outputs, temperature=1.2, seed=5),
        workload.neighbour("d", 70, outputs),
    )
    return tuple(replace(probe, sampling={**probe.sampling, **stress.sampling}) for probe in probes)


def _crowd(probes: Probes, workload: Workload) -> Sequence[Action]:
    others = [workload.neighbour(f"n{i}", length, 2) for i, length in enumerate((100, 17, 5))]
    a, b, c, d = probes
    return [Action(add=(others[1], c, a, others[0], b, d, others[2]))]


def _arrival(probes: Probes, workload: Workload) -> Sequence[Action]:
    held = workload.neighbour("n0", 20, 8)
    return [Action(add=(held,), steps=2), *(Action(add=(probe,), steps=1) for probe in probes), Action()]


def _chunks(probes: Probes, workload: Workload) -> Sequence[Action]:
    return [Action(add=(workload.neighbour("n0", 11, 4), *probes))]


def _cache(probes: Probes, workload: Workload) -> Sequence[Action]:
    return [Action(add=probes)]


def _preemption(probes: Probes, workload: Workload) -> Sequence[Action]:
    others = tuple(workload.neighbour(f"n{i}", 50 + i, 30) for i in range(3))
    return [Action(add=others, steps=3), Action(add=probes[::-1])]  # the one that came last is preempted first


def _copies(probes: Probes, workload: Workload) -> Sequence[Action]:
    others = tuple(workload.neighbour(f"n{i}", 5, 1) for i in range(20))
    return [Action(add=(*others, *probes))]


def _logprobs(probes: Probes, workload: Workload) -> Sequence[Action]:
    return [Action(add=tuple(replace(p, prompt_rows=False, sampling={**p.sampling, "logprobs": 5}) for p in probes))]


def _decode(probes: Probes, workload: Workload) -> Sequence[Action]:
    probe = probes[1]
    first = len(probe.tokens) - 10
    forced = replace(probe, tokens=probe.tokens[:first], forced=probe.tokens[first:], max_tokens=10)
    return [Action(add=(forced,))]


ENGINES: Mapping[str, Stress] = {
    "crowd": Stress(flags=(NO_CACHE, SMALL_BLOCKS), changed=_crowd),
    "crowd s32": Stress(flags=(NO_CACHE, SMALL_BLOCKS), changed=_crowd, arithmetic=Arithmetic.S32),
    "arrival": Stress(flags=(NO_CACHE,), changed=_arrival),
    "chunks": Stress(flags=(NO_CACHE, "--max-num-batched-tokens=71", SMALL_BLOCKS), changed=_chunks),
    "cache": Stress(flags=(SMALL_BLOCKS,), changed=_cache),
    "preemption": Stress(
        flags=(NO_CACHE, SMALL_BLOCKS),
        has_few_blocks=True,
        changed=_preemption,
        outputs=14,
        sampling={"temperature": 1.1, "seed": 3},
    ),
    "copies": Stress(flags=(NO_CACHE,), changed=_copies),
    "logprobs": Stress(flags=(NO_CACHE,), changed=_logprobs),
    "decode": Stress(flags=(NO_CACHE,), changed=_decode),
}
# Engines that differ in nothing but what their mutants run are one engine.
SHARED: Mapping[str, str] = {"arrival": "crowd", "copies": "crowd", "logprobs": "crowd", "decode": "crowd"}


def schedule_name(engine: str) -> str:
    """Name of the schedule that holds the mutants of an engine."""
    return f"mutants {SHARED.get(engine, engine)}"


def _setting(options: Options) -> Setting:
    return Setting(checkpoint=options.checkpoint, device=options.device)


def mutant_schedules(options: Options) -> list[Schedule]:
    """One schedule per engine, then those of images and of verification."""
    setting = _setting(options)
    workload = Workload.build(Sizes.from_model_dir(checkpoint_folder(options.checkpoint)), options.workload_seed)
    schedules = []
    for engine in sorted({SHARED.get(name, name) for name in ENGINES}):
        actions: list[Action] = []
        faults: dict[int, tuple[str, ...]] = {}
        for item in _of_engine(engine):
            stress = ENGINES[item.engine]
            own = _own_actions(item.name, stress, workload)
            if item.fault:
                faults |= {len(actions) + number: (item.fault,) for number in range(len(own))}
            actions += own
        stress = ENGINES[engine]
        own_setting = replace(setting, arithmetic=stress.arithmetic)
        few = few_blocks(workload.sizes, stress.arithmetic) if stress.has_few_blocks else ()
        made = make_schedule(schedule_name(engine), actions, own_setting, (*stress.flags, *few))
        schedules.append(replace(made, action_faults=faults, observe=False))
    return [*schedules, image_mutant_schedule(setting, workload), *draft_mutant_schedules(setting, workload)]


def _of_engine(engine: str) -> list[Mutant]:
    """The engine's mutants, after controls of all schedules that run in it."""
    stresses = [name for name in ENGINES if SHARED.get(name, name) == engine]
    controls = [
        Mutant(name=f"{CONTROL} {name}", what="no fault", fault="", relation="none", engine=name) for name in stresses
    ]
    return controls + [item for item in ENGINE_MUTANTS if item.engine in stresses]


def _own_actions(name: str, stress: Stress, workload: Workload) -> list[Action]:
    probes = _probes(workload, stress)
    alone = Action(reset_prefix_cache=True)
    actions = [alone, *(Action(add=(_named(probe, name, "alone"),)) for probe in probes)]
    for action in stress.changed(probes, workload):
        actions.append(replace(action, add=tuple(_named(request, name, "changed") for request in action.add)))
    return actions


def _named(request: Request, mutant: str, phase: str) -> Request:
    return replace(request, name=f"{request.name}@{mutant} {phase}")


def compare_mutant(name: str, result: ScheduleResult) -> Comparison:
    """Compare a mutant's probes alone with the same probes under the change."""
    requests = result.schedule.requests
    total = Comparison()
    for changed_name, request in requests.items():
        base, _, suffix = changed_name.partition("@")
        alone_name = f"{base}@{name} alone"
        if suffix != f"{name} changed" or alone_name not in requests:
            continue
        total += compare_request(
            changed_name,
            Given(request=requests[alone_name], result=result.requests[alone_name]),
            Given(request=request, result=result.requests[changed_name]),
            may_be_short=bool(request.forced),
        )
    return total
