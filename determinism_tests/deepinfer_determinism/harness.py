"""One session of the harness: which schedules are needed, the children that run them, and what was found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepinfer_determinism import mechanisms, relations, schedule
from deepinfer_determinism.compare import Comparison, Given, compare_request
from deepinfer_determinism.coverage import coverage_rows
from deepinfer_determinism.engine import Children, ScheduleResult, checkpoint_folder
from deepinfer_determinism.relations import Relation, Setting
from deepinfer_determinism.results import (
    CoverageRow,
    MutantResult,
    OperationResult,
    RelationResult,
    RunResult,
)
from deepinfer_determinism.schedule import Schedule
from deepinfer_determinism.workload import Sizes, Workload, base_name
from deepinfer_plugin.errors import EngineError

NUM_CHILDREN = 2  # at once: the quick set is made for two cores
RESTARTED = "restart"  # the relation that must not share a process with what it is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    checkpoint: str = "nano:0"
    device: str = "cpu"
    depth: str = "quick"
    workload_seed: int = 0
    schedules: Path | None = None


class Harness:
    """Runs what tests ask for, in the order of the plan, and collects the results."""

    def __init__(self, options: Options, children: Children, has_whole_set: bool = True) -> None:
        self._options = options
        self._has_whole_set = has_whole_set
        self._children = children
        self._streams: list[Iterator[ScheduleResult]] = []
        self._stream_of: dict[str, int] = {}
        self._arrived: dict[str, ScheduleResult] = {}
        self._begin_s = time.monotonic()
        self._reached: list[Mapping[str, tuple[int, int]]] = []
        self._relations: list[RelationResult] = []
        self._mutants: list[MutantResult] = []
        self._operations: list[OperationResult] = []
        self.cpu_s = 0.0

    def start(self, groups: Sequence[Sequence[Schedule]]) -> None:
        """Start one child per group; names of schedules are unique over all groups."""
        for group in groups:
            if group:
                for item in group:
                    self._stream_of[item.name] = len(self._streams)
                    self._store(item)
                self._streams.append(self._children.start(group))

    def result(self, name: str) -> ScheduleResult:
        """Wait for the result of a schedule."""
        stream = self._streams[self._stream_of[name]]
        while name not in self._arrived:
            result = next(stream, None)
            if result is None:
                raise EngineError(f"engine child: schedule {name!r} did not run, its child had ended before it")
            self._arrived[result.schedule.name] = result
            self._reached.append(result.reached)
            self.cpu_s += result.cpu_s
        return self._arrived[name]

    def drop(self, name: str) -> None:
        """Free the rows of a schedule that nothing is compared with any more."""
        self._arrived.pop(name, None)

    def check(
        self, relation: Relation, setting: Setting, name: str, alone_name: str, workload: Workload
    ) -> RelationResult:
        """Compare the schedule of a relation with the probes alone."""
        if setting.device in relation.not_on:
            result = RelationResult(
                relation=relation.name,
                configuration=setting.label,
                rows_compared=0,
                differences=0,
                first_difference=None,
                mechanisms={},
                exercised=False,
                seconds=0.0,
                not_applicable=relation.not_on[setting.device],
            )
            self._relations.append(result)
            return result
        got, want = self.result(name), self.result(alone_name)
        comparison = compare_probes(workload, want, got)
        counts = mechanisms.count(got)
        result = RelationResult(
            relation=relation.name,
            configuration=" ".join((setting.label, *got.schedule.run.flags[len(relations.BASE_FLAGS) :])),
            rows_compared=comparison.rows,
            differences=comparison.differences,
            first_difference=comparison.first,
            mechanisms={key: value for key, value in counts.items() if value > 0 or key in relation.required},
            exercised=all(counts[key] >= least for key, least in relation.required.items()),
            seconds=got.seconds,
            schedules=self._paths(alone_name, name),
        )
        self._relations.append(result)
        self.drop(name)
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


def make_workload(setting: Setting, depth: str, seed: int) -> Workload:
    """The probes of a configuration."""
    sizes = Sizes.from_model_dir(checkpoint_folder(setting.checkpoint))
    return Workload.build(sizes, seed) if depth == "quick" else Workload.build_full(sizes, seed)


def named(item: Schedule, name: str) -> Schedule:
    """The schedule under another name."""
    return replace(item, run=replace(item.run, name=name))


def alone_schedule(workload: Workload, setting: Setting, name: str) -> Schedule:
    """The probes alone, under a name of its own."""
    return named(relations.alone(workload, setting), name)
