"""The plan of a session: cases in the order in which they run, and the schedules that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_determinism.cases import Case
from deepinfer_determinism.configurations import configurations
from deepinfer_determinism.engine import checkpoint_folder
from deepinfer_determinism.harness import Options
from deepinfer_determinism.relations import Setting
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases in the order in which they run."""

    cases: tuple[Case, ...]
    options: Options

    def schedules(self, wanted: Sequence[Case], *, has_mutants: bool) -> list[Schedule]:
        """What the children run: the probes alone, then what needs another process than they, last the mutants."""
        cases = [case for case in wanted if not case.not_applicable]
        alone = {case.configuration.alone_name: case.configuration.alone for case in cases}
        apart = [case.schedule for case in cases if case.relation.has_own_process]
        others = [case.schedule for case in cases if not case.relation.has_own_process]
        found = [*alone.values(), *apart, *others]
        if has_mutants:
            from deepinfer_determinism.mutant_runs import mutant_schedules

            found += mutant_schedules(self.options)
        return found


def make_plan(options: Options, only: Sequence[str]) -> Plan:
    """All cases of a depth, or those of the named relations."""
    first = Setting(checkpoint=options.checkpoint, device=options.device)
    sizes = Sizes.from_model_dir(checkpoint_folder(options.checkpoint))
    cases = [
        Case(relation=relation, configuration=configuration)
        for configuration in configurations(first, sizes, options.depth, options.workload_seed, options.num_places)
        for relation in configuration.relations
        if not only or relation.name in only
    ]
    return Plan(cases=tuple(cases), options=options)
