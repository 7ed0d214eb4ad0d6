"""The child: ``python -m deepinfer_determinism.child``; one results file per schedule.

Every line of its standard input is a JSON list of a plan's path and the folder for its results. Several children work
through one plan: each takes the next schedule that nobody has taken. Unlike the child of the engine tests it enters
faults around single actions, so that one engine serves many mutants, and it counts which thresholds were reached.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_determinism.engine_facts import CAPTURED_SIZES, CONCURRENT_BATCHES, RANKS
from deepinfer_determinism.schedule import Schedule, plan_from_json
from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.drafters import Answers
from deepinfer_plugin.engine_child.plan import FACTS_KEY
from deepinfer_plugin.platforms.detect import platform_class

if TYPE_CHECKING:
    from deepinfer_plugin.engine_child.child import EngineDriver

ENGINE_KEY = "engine"  # of the metadata: what vLLM's configuration became, see ``_engine_facts``
REACHED_KEY = "reached"  # of the metadata: [below, above] by threshold
CPU_KEY = "cpu_s"  # of the metadata: processor seconds of this schedule


def result_path(folder: Path, number: int) -> Path:
    """Where the results of schedule ``number`` of a plan lie."""
    return folder / f"{number}.safetensors"


def claim_path(folder: Path, number: int) -> Path:
    """What exists once a child has taken schedule ``number`` of a plan: it holds the id of that process."""
    return folder / f"{number}.taken"


def run_schedule(schedule: Schedule, out: Path, answers: Answers) -> None:
    """Build the engine, act, stop it, write what came; ``answers`` are of the engines before in this process."""
    from safetensors.numpy import save_file

    from deepinfer_plugin.engine_child.child import EngineDriver
    from deepinfer_plugin.engine_child.faults import Calls

    run = schedule.run
    envs.set_variable("DEEPINFER_ARITHMETIC", run.arithmetic.value)
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    calls: dict[str, Calls] = defaultdict(Calls)
    with ExitStack() as stack:
        stack.enter_context(envs.variables_set(run.variables))
        reached: dict[str, list[int]] = stack.enter_context(_observed()) if schedule.observe else {}
        whole_run = {path: stack.enter_context(_fault(path)) for path in run.faults}
        driver = EngineDriver(run, answers)
        stack.callback(driver.close)
        started_s = time.monotonic()
        for paths, numbers in _spans(schedule):
            with ExitStack() as span_stack:
                counters = {path: span_stack.enter_context(_fault(path)) for path in paths}
                for number in numbers:
                    driver.act(run.actions[number])
                for path, counter in counters.items():
                    calls[path].calls += counter.calls
                    calls[path].seen.update(counter.seen)
        facts = driver.facts(started_s - begin_s, time.monotonic() - started_s, {**calls, **whole_run})
        arrays = driver.arrays(run.name)
        engine = _engine_facts(driver)
    metadata = {
        FACTS_KEY: json.dumps(asdict(facts)),
        ENGINE_KEY: json.dumps(engine),
        REACHED_KEY: json.dumps(reached),
        CPU_KEY: json.dumps(time.process_time() - begin_cpu_s),
    }
    partial = out.with_suffix(".partial")
    save_file(arrays, partial, metadata=metadata)
    partial.replace(out)


def _spans(schedule: Schedule) -> Iterator[tuple[tuple[str, ...], list[int]]]:
    """Faults, and the numbers of the actions in a row that they are in force in: entered once, they keep state."""
    numbers = range(len(schedule.run.actions))
    for paths, span in itertools.groupby(numbers, lambda number: schedule.action_faults.get(number, ())):
        yield paths, list(span)


def _engine_facts(driver: EngineDriver) -> dict[str, int]:
    """Counts by name that vLLM's configuration fixes, whatever was asked for."""
    config = driver._engine.vllm_config
    has_graphs = bool(config.compilation_config.cudagraph_mode) and not config.model_config.enforce_eager
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    return {
        CONCURRENT_BATCHES: int(config.max_concurrent_batches),
        CAPTURED_SIZES: len(sizes) if has_graphs else 0,
        RANKS: int(config.parallel_config.world_size),  # vLLM starts when all of them are ready
    }


def _observed() -> AbstractContextManager[dict[str, list[int]]]:
    from deepinfer_determinism.coverage import observe

    return observe()


def _fault(path: str) -> Any:
    """The context manager that an import path ``module:name`` or ``module:name(argument)`` names."""
    module, _, name = path.partition(":")
    name, _, argument = name.removesuffix(")").partition("(")
    make = getattr(importlib.import_module(module), name)
    return make(argument) if argument else make()


def main() -> None:
    """Run every schedule of every plan that no other child has taken."""
    platform_class()  # before torch, Triton and vLLM are imported
    from deepinfer_plugin.engine_child.child import collect_engine, load_vllm

    load_vllm()
    ran: set[str] = set()
    answers = Answers()
    for line in sys.stdin:
        plan, folder = (Path(word) for word in json.loads(line))
        for number, schedule in enumerate(plan_from_json(plan.read_text(encoding="utf-8"))):
            is_for_another = schedule.apart_from in ran or (schedule.beside and schedule.beside not in ran)
            if is_for_another or not _take(claim_path(folder, number)):
                continue
            ran.add(schedule.name)
            run_schedule(schedule, result_path(folder, number), answers)
            collect_engine()


def _take(claim: Path) -> bool:
    """Whether this process is the first that claims a schedule; the file then holds its id."""
    try:
        with claim.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
