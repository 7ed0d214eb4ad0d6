"""The plan of a session: configurations, their relations, and how schedules are shared out to children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepinfer_determinism import relations
from deepinfer_determinism.harness import NUM_CHILDREN, RESTARTED, Options, alone_schedule, make_workload, named
from deepinfer_determinism.relations import Relation, Setting
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload
from deepinfer_plugin.settings import Arithmetic

# Tried in fp32 too: there the order of a sum shows, which the roundings of the served arithmetic nearly always hide.
SENSITIVE = ("neighbours", "chunks", "cache hit", "preemption", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One relation in one configuration."""

    relation: Relation
    setting: Setting
    workload: Workload
    label: str  # of the configuration; empty for the one of the command line

    @property
    def name(self) -> str:
        return f"{self.relation.name} {self.label}".strip()

    @property
    def alone_name(self) -> str:
        return f"{relations.ALONE} {self.label}".strip()

    @property
    def schedule(self) -> Schedule:
        return named(self.relation.schedule(self.workload, self.setting), self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases in the order in which they run."""

    cases: tuple[Case, ...]
    options: Options

    def groups(self, wanted: Sequence[Case], *, has_mutants: bool) -> list[list[Schedule]]:
        """Schedules per child: probes alone first, the restarted run in another child."""
        groups: list[list[Schedule]] = [[] for _ in range(NUM_CHILDREN)]
        alone: set[str] = set()
        position = 0
        for case in wanted:
            if case.setting.device in case.relation.not_on:
                continue
            if case.alone_name not in alone:
                alone.add(case.alone_name)
                groups[0].append(alone_schedule(case.workload, case.setting, case.alone_name))
                position = 1
            if case.relation.name == RESTARTED:
                groups[1].append(case.schedule)
            else:
                groups[position % NUM_CHILDREN].append(case.schedule)
                position += 1
        if has_mutants:
            from deepinfer_determinism.mutant_runs import mutant_schedules

            for number, item in enumerate(mutant_schedules(self.options)):
                groups[(position + number) % NUM_CHILDREN].append(item)
        return [group for group in groups if group]


def make_plan(options: Options, only: Sequence[str]) -> Plan:
    """All cases of a depth, or those of the named relations."""
    cases = []
    for label, setting, seed, names in _configurations(options):
        workload = make_workload(setting, options.depth, seed)
        cases += [
            Case(relation=relation, setting=setting, workload=workload, label=label)
            for relation in relations.RELATIONS
            if (not only or relation.name in only) and (not names or relation.name in names)
        ]
    return Plan(cases=tuple(cases), options=options)


def _configurations(options: Options) -> list[tuple[str, Setting, int, tuple[str, ...]]]:
    """Label, setting, seed of the workload and names of the relations, none for all."""
    first = Setting(checkpoint=options.checkpoint, device=options.device)
    exact, quantised = (replace(first, arithmetic=arithmetic) for arithmetic in (Arithmetic.S32, Arithmetic.Q32))
    seed = options.workload_seed
    if options.depth == "quick":
        return [("", first, seed, ()), ("s32", exact, seed, SENSITIVE)]
    more = f"seed {seed + 1}"
    return [("", first, seed, ()), ("s32", exact, seed, ()), ("q32", quantised, seed, ()), (more, first, seed + 1, ())]
