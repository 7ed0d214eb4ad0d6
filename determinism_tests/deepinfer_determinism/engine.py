"""vLLM in child processes: run schedules, hand back rows and facts."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

from deepinfer_determinism.child import CPU_KEY, ENGINE_KEY, REACHED_KEY, result_path
from deepinfer_determinism.schedule import SMALL_CHECKPOINTS, Schedule, plan_to_json
from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.plan import FACTS_KEY, RunFacts, facts_from_json
from deepinfer_plugin.engine_child.run import RequestResult
from deepinfer_plugin.errors import EngineError, InputError

TAIL_LINES = 30
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """What one schedule gave.

    Attributes:
        schedule: what was run.
        facts: what the scheduler did.
        requests: rows and tokens by request.
        engine: what vLLM's configuration became, counts by name.
        reached: per threshold how often the quantity stayed below it and how often it reached it.
        cpu_s: processor seconds of the child, start of the engine included.
    """

    schedule: Schedule
    facts: RunFacts
    requests: Mapping[str, RequestResult]
    engine: Mapping[str, int]
    reached: Mapping[str, tuple[int, int]]
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Wall time of the engine, its start included."""
        return self.facts.start_s + self.facts.run_s


class Children:
    """Child processes, each working through a plan; leaving the context stops those that still run."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._temporary = tempfile.TemporaryDirectory(prefix="deepinfer-determinism-")
        self._started: list[_Child] = []
        self._lasting: _Child | None = None

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self._started:
            child.stop()
        self._temporary.cleanup()

    def start(self, schedules: Sequence[Schedule], timeout_s: float = 3600.0) -> Iterator[ScheduleResult]:
        """Start a child at once; the iterator yields each result when it is there, and raises EngineError.

        Args:
            schedules: run one after another in this child.
            timeout_s: for all of them.
        """
        child = self._new_child()
        child.send(schedules)
        child.close()
        return child.results(schedules, timeout_s)

    def run(self, schedules: Sequence[Schedule], timeout_s: float = 3600.0) -> dict[str, ScheduleResult]:
        """Run schedules one after another in a child that the next call uses again; results by name of the schedule."""
        child = self._lasting = self._lasting or self._new_child()
        child.send(schedules)
        return {result.schedule.name: result for result in child.results(schedules, timeout_s)}

    def _new_child(self) -> _Child:
        folder = Path(self._temporary.name) / str(len(self._started))
        folder.mkdir()
        child = _Child(folder, self._device)
        self._started.append(child)
        return child


def run_schedules(schedules: Sequence[Schedule], device: str = "cpu") -> dict[str, ScheduleResult]:
    """Run schedules one after another in one child; results by name of the schedule."""
    with Children(device) as children:
        return children.run(schedules)


class _Child:
    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._num_plans = folder, 0
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            variables["DEEPINFER_ACCELERATOR"] = "cpu"
        self._log = folder / "child.log"
        with open(self._log, "wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer_determinism.child"],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=envs.child_environment(variables),
                text=True,
            )

    def send(self, schedules: Sequence[Schedule]) -> None:
        """Let the child run a plan behind those it has; one that has ended is noticed where its results are read."""
        self._num_plans += 1
        out = self._folder / str(self._num_plans)
        out.mkdir()
        plan = out / "plan.json"
        plan.write_text(plan_to_json([_with_model(schedule) for schedule in schedules]), encoding="utf-8")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([str(plan), str(out)]) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """No plan follows: the child ends behind its last one."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def results(self, schedules: Sequence[Schedule], timeout_s: float) -> Iterator[ScheduleResult]:
        """Results of the plan that was sent last."""
        folder, begin_s = self._folder / str(self._num_plans), time.monotonic()
        for number, schedule in enumerate(schedules):
            path = result_path(folder, number)
            while not path.exists():
                code = self._process.poll()
                if code is not None and not path.exists():
                    raise EngineError(self._failure(f"ended with exit code {code}", schedule))
                if time.monotonic() - begin_s > timeout_s:
                    self.stop()
                    raise EngineError(self._failure(f"was stopped after {timeout_s:.0f} s", schedule))
                time.sleep(POLL_S)
            yield _read(path, schedule)
            path.unlink()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.close()
        self._process.wait()

    def _failure(self, ending: str, schedule: Schedule) -> str:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return f"engine child: schedule {schedule.name!r}: it {ending}; its log ends\n" + "\n".join(tail)


def _read(path: Path, schedule: Schedule) -> ScheduleResult:
    """Results of one file; array names are ``engine/request/...``, so no name of ours holds a slash."""
    with safe_open(path, framework="pt") as file:
        arrays: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    facts = facts_from_json(json.loads(metadata[FACTS_KEY]))
    requests = {
        name: RequestResult(
            tokens=tuple(arrays[f"{schedule.name}/{name}/{i}/tokens"] for i in range(len(request.outputs))),
            logits=tuple(arrays[f"{schedule.name}/{name}/{i}/logits"] for i in range(len(request.outputs))),
            prompt_logits=arrays.get(f"{schedule.name}/{name}/prompt_logits"),
            facts=request,
        )
        for name, request in facts.requests.items()
    }
    return ScheduleResult(
        schedule=schedule,
        facts=facts,
        requests=requests,
        engine=json.loads(metadata[ENGINE_KEY]),
        reached={name: (below, above) for name, (below, above) in json.loads(metadata[REACHED_KEY]).items()},
        cpu_s=float(json.loads(metadata[CPU_KEY])),
    )


def _with_model(schedule: Schedule) -> Schedule:
    return replace(schedule, run=replace(schedule.run, model=str(checkpoint_folder(schedule.run.model))))


@functools.cache
def _small_checkpoints() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="deepinfer-checkpoint-")


@functools.cache
def checkpoint_folder(reference: str) -> Path:
    """The folder of ``nano:0``, written on first use and kept for the life of this process, or of a path.

    Raises:
        InputError: neither a small checkpoint nor a folder with a config.json.
    """
    name, _, seed = reference.partition(":")
    if name in SMALL_CHECKPOINTS and (seed or "0").isdigit():
        from deepinfer_plugin.reference.tiny import write_checkpoint

        folder = Path(_small_checkpoints().name) / f"{name}-s{seed or 0}"
        folder.mkdir()
        write_checkpoint(name, int(seed or 0), folder)
        return folder
    if not (Path(reference) / "config.json").is_file():
        raise InputError(
            f"checkpoint: {reference} holds no config.json, expected a model folder, or nano:SEED or tiny:SEED"
        )
    return Path(reference)
