"""vLLM in child processes: run schedules, hand back rows and facts."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open

from deepinfer_determinism.child import CPU_KEY, ENGINE_KEY, REACHED_KEY, claim_path, result_path
from deepinfer_determinism.schedule import SMALL_CHECKPOINTS, Schedule, plan_to_json
from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.gpus import rotated, worker_start
from deepinfer_plugin.engine_child.plan import FACTS_KEY, RunFacts, facts_from_json
from deepinfer_plugin.engine_child.run import RequestResult
from deepinfer_plugin.errors import EngineError, InputError
from deepinfer_plugin.platforms.detect import visible_gpus

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
    """Child processes that work through the same plans; leaving the context stops them.

    On several GPUs each begins at another one, which its engines of one rank use.

    Args:
        device: ``cpu`` or ``cuda``.
        count: processes; they start with the first plan.
    """

    def __init__(self, device: str = "cpu", count: int = 1) -> None:
        self._device, self._count = device, count
        self._gpus = visible_gpus() if device == "cuda" else ()
        self._temporary = tempfile.TemporaryDirectory(prefix="deepinfer-determinism-")
        self._children: list[_Child] = []
        self._num_plans = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self._children:
            child.stop()
        self._temporary.cleanup()

    def start(self, schedules: Sequence[Schedule], timeout_s: float = 3600.0) -> Running:
        """Let the children work through a plan, behind those that they have; each schedule runs in one of them.

        Args:
            schedules: taken in this order.
            timeout_s: for all of them, from now on.
        """
        root = Path(self._temporary.name)
        while len(self._children) < self._count:
            number = len(self._children)
            self._children.append(_Child(root / f"child-{number}.log", self._device, rotated(self._gpus, number)))
        self._num_plans += 1
        folder = root / str(self._num_plans)
        folder.mkdir()
        plan = folder / "plan.json"
        plan.write_text(plan_to_json([_with_model(schedule) for schedule in schedules]), encoding="utf-8")
        for child in self._children:
            child.send([str(plan), str(folder)])
        return Running(self._children, schedules, folder, time.monotonic() + timeout_s)

    def run(self, schedules: Sequence[Schedule], timeout_s: float = 3600.0) -> dict[str, ScheduleResult]:
        """Run schedules; results by name."""
        running = self.start(schedules, timeout_s)
        return {schedule.name: running.result(schedule.name) for schedule in schedules}


class Running:
    """A plan that children work through."""

    def __init__(
        self, children: Sequence[_Child], schedules: Sequence[Schedule], folder: Path, deadline_s: float
    ) -> None:
        self._children, self._folder, self._deadline_s = children, folder, deadline_s
        self._numbers = {schedule.name: number for number, schedule in enumerate(schedules)}
        self._schedules = schedules

    def result(self, name: str) -> ScheduleResult:
        """Wait for the result of a schedule; it can be read once.

        Raises:
            EngineError: the child that took it has ended, all have ended, or time is over.
        """
        number = self._numbers[name]
        path, schedule = result_path(self._folder, number), self._schedules[number]
        while not path.exists():
            lost = self._lost(number)
            if lost is not None and not path.exists():
                raise EngineError(lost.failure(schedule, f"ended with exit code {lost.exit_code}"))
            if time.monotonic() > self._deadline_s:
                raise EngineError(self._children[0].failure(schedule, "did not come in time"))
            time.sleep(POLL_S)
        result = _read(path, schedule)
        path.unlink()
        return result

    def _lost(self, number: int) -> _Child | None:
        """The ended child for which this schedule waits in vain."""
        ended = {child.process_id: child for child in self._children if child.exit_code is not None}
        claim = claim_path(self._folder, number)
        taken_by = claim.read_text(encoding="utf-8") if claim.exists() else ""
        if taken_by in ended:
            return ended[taken_by]
        return self._children[0] if len(ended) == len(self._children) else None


def run_schedules(schedules: Sequence[Schedule], device: str = "cpu") -> dict[str, ScheduleResult]:
    """Run schedules one after another in one child; results by name of the schedule."""
    with Children(device) as children:
        return children.run(schedules)


class _Child:
    def __init__(self, log: Path, device: str, gpus: Mapping[str, str]) -> None:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            envs.WORKER_START_SWITCH: worker_start(device),
            **gpus,
        }
        if device == "cpu":
            variables["DEEPINFER_ACCELERATOR"] = "cpu"
        self._log = log
        with open(self._log, "wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer_determinism.child"],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=envs.child_environment(variables),
                text=True,
            )

    @property
    def process_id(self) -> str:
        return str(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def send(self, words: Sequence[str]) -> None:
        """Hand over a plan; that the child has ended is noticed where its results are read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def failure(self, schedule: Schedule, ending: str) -> str:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return f"engine child: schedule {schedule.name!r}: it {ending}; the child's log ends\n" + "\n".join(tail)


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
