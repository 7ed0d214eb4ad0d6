"""The engine in which faults of images are planted: each probe alone with empty caches, then under one relation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from deepinfer_determinism.image_relations import image_probe
from deepinfer_determinism.mutants_images import ENGINE, IMAGE_MUTANTS
from deepinfer_determinism.relations import SMALL_BLOCKS, Setting, make_schedule
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import PAGES, Workload
from deepinfer_plugin.engine_child.plan import Action, Request

SCHEDULE = f"mutants {ENGINE}"
CONTROL = "control"
BUDGET = 71  # tokens of a step: each probe fits alone, and borders lie inside spans when all come at once
_HELD = 15  # tokens of a neighbour that moves these borders


def _probes(workload: Workload) -> tuple[Request, ...]:
    """A hit of the first PAGES[0] tokens ends inside the span of ``cut`` and right behind that of ``behind``."""
    shapes: Mapping[str, tuple[int, tuple[int, ...], int]] = {
        "first": (9, (0,), 30),
        "twin": (9, (2,), 30),  # the same text, another picture of the same size
        "cut": (20, (0,), 20),
        "behind": (PAGES[0] - 17, (0,), 20),
        "two": (4, (3, 0), 10),
    }
    return tuple(
        image_probe(workload.sizes, workload.seed, name, lead, pictures, tail=tail, max_tokens=2)
        for name, (lead, pictures, tail) in shapes.items()
    )


def _order(probes: Sequence[Request], workload: Workload) -> Sequence[Action]:
    del workload
    return [_fresh(*probes[::-1])]


def _chunks(probes: Sequence[Request], workload: Workload) -> Sequence[Action]:
    return [_fresh(workload.neighbour("n0", _HELD, 5), *probes)]


def _cache_hit(probes: Sequence[Request], workload: Workload) -> Sequence[Action]:
    del workload
    return [_fresh(*(replace(probe, name=f"{probe.name} cold") for probe in probes)), Action(add=tuple(probes))]


def _fresh(*requests: Request) -> Action:
    return Action(add=requests, reset_prefix_cache=True, reset_image_caches=True)


CHANGES: Mapping[str, Callable[[Sequence[Request], Workload], Sequence[Action]]] = {
    "order": _order,
    "chunks": _chunks,
    "cache hit": _cache_hit,
}


def image_mutant_schedule(setting: Setting, workload: Workload) -> Schedule:
    """Controls of every relation, then each fault in force for its own actions."""
    probes = _probes(workload)
    plan = [(f"{CONTROL} {relation}", "", relation) for relation in CHANGES]
    plan += [(mutant.name, mutant.fault, mutant.relation) for mutant in IMAGE_MUTANTS]
    actions: list[Action] = []
    faults: dict[int, tuple[str, ...]] = {}
    for name, fault, relation in plan:
        own = [_fresh(_named(probe, name, "alone")) for probe in probes]
        for action in CHANGES[relation](probes, workload):
            own.append(replace(action, add=tuple(_named(request, name, "changed") for request in action.add)))
        if fault:
            faults |= {len(actions) + number: (fault,) for number in range(len(own))}
        actions += own
    made = make_schedule(SCHEDULE, actions, setting, (SMALL_BLOCKS, f"--max-num-batched-tokens={BUDGET}"))
    return replace(made, action_faults=faults, observe=False)


def _named(request: Request, mutant: str, phase: str) -> Request:
    return replace(request, name=f"{request.name}@{mutant} {phase}")
