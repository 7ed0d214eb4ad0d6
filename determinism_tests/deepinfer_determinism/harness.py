"""One session of the harness: which schedules are needed, the children that run them, and what was found."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_determinism import mechanisms, relations, schedule
from deepinfer_determinism.cases import Case
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.coverage import coverage_rows
from deepinfer_determinism.engine import Children, Running, ScheduleResult
from deepinfer_determinism.results import (
    CoverageRow,
    MutantResult,
    OperationResult,
    RelationResult,
    RunResult,
)
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Workload, base_name

# At once, by device: the quick set is made for two cores; with an accelerator a start keeps one core busy.
NUM_CHILDREN = {"cpu": 2, "cuda": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    checkpoint: str = "nano:0"
    device: str = "cpu"
    depth: str = "quick"
    workload_seed: int = 0
    schedules: Path | None = None
    num_places: int = 0  # for ranks on GPUs that this process may use


class Harness:
    """Runs what tests ask for, in the order of the plan, and collects the results."""

    def __init__(self, options: Options, children: Children, has_whole_set: bool = True) -> None:
        self._options = options
        self._has_whole_set = has_whole_set
        self._children = children
        self._running: dict[str, Running] = {}
        self._arrived: dict[str, ScheduleResult] = {}
        self._begin_s = time.monotonic()
        self._reached: list[Mapping[str, tuple[int, int]]] = []
        self._relations: list[RelationResult] = []
        self._mutants: list[MutantResult] = []
        self._operations: list[OperationResult] = []
        self.cpu_s = 0.0

    def start(self, schedules: Sequence[Schedule]) -> None:
        """Let the children run schedules, whose names are unique, but those that they have already."""
        new = [item for item in schedules if item.name not in self._running]
        if new:
            for item in new:
                self._store(item)
            self._running |= dict.fromkeys([item.name for item in new], self._children.start(new))

    def result(self, name: str) -> ScheduleResult:
        """Wait for the result of a schedule."""
        if name not in self._arrived:
            result = self._arrived[name] = self._running[name].result(name)
            self._reached.append(result.reached)
            self.cpu_s += result.cpu_s
        return self._arrived[name]

    def drop(self, name: str) -> None:
        """Free the rows of a schedule that nothing is compared with any more."""
        self._arrived.pop(name, None)

    def check(self, case: Case) -> RelationResult:
        """Compare the schedule of a case with the probes alone."""
        configuration = case.configuration
        label = " ".join(filter(None, (configuration.setting.label, configuration.label)))
        if case.not_applicable:
            result = RelationResult(
                relation=case.relation.name,
                configuration=label,
                rows_compared=0,
                differences=0,
                first_difference=None,
                mechanisms={},
                exercised=False,
                seconds=0.0,
                not_applicable=case.not_applicable,
            )
            self._relations.append(result)
            return result
        got, want = self.result(case.name), self.result(configuration.alone_name)
        comparison = compare_probes(configuration.workload, want, got)
        counts = mechanisms.count(got)
        result = RelationResult(
            relation=case.relation.name,
            configuration=" ".join((label, *got.schedule.run.flags[len(relations.BASE_FLAGS) :])),
            rows_compared=comparison.rows,
            differences=comparison.differences,
            first_difference=comparison.first,
            mechanisms={key: value for key, value in counts.items() if value > 0 or key in case.required},
            exercised=all(counts[key] >= least for key, least in case.required.items()),
            seconds=got.seconds,
            schedules=self._paths(configuration.alone_name, case.name),
        )
        self._relations.append(result)
        self.drop(case.name)
        return result

    def add_mutant(self, result: MutantResult) -> None:
        self._mutants.append(result)

    def add_operation(self, result: OperationResult) -> None:
        self._operations.append(result)

    def add_reached(self, reached: Mapping[str, Sequence[int]]) -> None:
        """Count what an operation by itself reached."""
        self._reached.append({name: (below, above) for name, (below, above) in reached.items()})

    def coverage(self) -> tuple[CoverageRow, ...]:
        """Every threshold of the device, over the operations and all engines that have arrived."""
        return coverage_rows(self._reached, self._options.device)

    def run_result(self, *, is_complete: bool, failures: Sequence[str], seconds: float) -> RunResult:
        """Everything found so far."""
        return RunResult(
            depth=self._options.depth,
            device=self._options.device,
            checkpoint=self._options.checkpoint,
            workload_seed=self._options.workload_seed,
            seconds=seconds,
            is_complete=is_complete,
            relations=tuple(self._relations),
            operations=tuple(self._operations),
            mutants=tuple(self._mutants),
            coverage=self.coverage() if self._has_whole_set and self._reached else (),
            failures=tuple(failures),
            notes={"engine_cpu_s": f"{self.cpu_s:.0f}"},
        )

    def _store(self, item: Schedule) -> None:
        if self._options.schedules is not None:
            schedule.save(item, self._path(item.name))

    def _path(self, name: str) -> Path:
        assert self._options.schedules is not None
        return self._options.schedules / f"{name.replace(' ', '_').replace(':', '-')}.json"

    def _paths(self, *names: str) -> tuple[str, ...]:
        return tuple(str(self._path(name)) for name in names) if self._options.schedules is not None else ()


def compare_probes(workload: Workload, want: ScheduleResult, got: ScheduleResult) -> Comparison:
    """Compare every probe in ``got``, under whatever suffix, with the probe alone."""
    probes = {probe.name: probe for probe in workload.probes}
    aborted = {name for action in got.schedule.run.actions for name in action.abort}
    total = Comparison()
    for name, request in got.schedule.requests.items():
        base = base_name(name)
        if base not in probes:
            continue
        total += compare_request(
            name,
            Given(request=probes[base], result=want.requests[base]),
            Given(request=request, result=got.requests[name]),
            may_be_short=name in aborted or bool(request.forced),
        )
    return total
