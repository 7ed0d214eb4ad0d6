"""Parent's side: start a child on a plan and hand back what it found, per engine and request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open

from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.gpus import serving_gpus, worker_start
from deepinfer_plugin.engine_child.plan import (
    FACTS_KEY,
    EngineRun,
    RequestFacts,
    RunFacts,
    check_names,
    facts_from_json,
    runs_to_json,
)
from deepinfer_plugin.errors import EngineError

TAIL_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Arrays of one request, one entry per completion.

    Attributes:
        tokens: [num_output_tokens] int64 each.
        logits: [num_output_tokens, vocab_size] fp32 each, before any processor; row i chose output token i.
        prompt_logits: [num_prompt_tokens - 1, vocab_size] fp32, or None where they were not asked for.
        facts: what vLLM did with it.
    """

    tokens: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]
    prompt_logits: torch.Tensor | None
    facts: RequestFacts

    @property
    def rows(self) -> torch.Tensor:
        """[num_rows, vocab_size] fp32: the prompt's rows, where present, and those of the only completion."""
        (logits,) = self.logits
        return logits if self.prompt_logits is None else torch.cat([self.prompt_logits, logits])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One engine: its facts and its requests by name."""

    facts: RunFacts
    requests: dict[str, RequestResult]


class _Child:
    """One child process on its part of the plan; leaving the context stops it if it still runs."""

    def __init__(self, runs: Sequence[EngineRun], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._out = folder / "child.log", folder / "results.safetensors"
        plan = folder / "plan.json"
        plan.write_text(json.dumps(runs_to_json(runs)), encoding="utf-8")
        self._command = [sys.executable, "-m", "deepinfer_plugin.engine_child.child", str(plan), str(self._out)]

    def __enter__(self) -> _Child:
        environment = envs.child_environment(
            {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
                envs.WORKER_START_SWITCH: worker_start("cuda" if serving_gpus() else "cpu"),
            }
        )
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def results(self, deadline_s: float) -> dict[str, RunResult]:
        """Wait for the child and read what it wrote."""
        try:
            code = self._process.wait(timeout=max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise EngineError(self._with_tail("engine child: was too slow and is stopped")) from None
        if code != 0:
            raise EngineError(self._with_tail(f"engine child: ended with exit code {code}"))
        return _read(self._out)

    def _with_tail(self, text: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{text}; its log ends", *lines])


def run_engines(
    runs: Sequence[EngineRun], folder: Path | None = None, *, num_children: int = 1, timeout_s: float = 1200.0
) -> dict[str, RunResult]:
    """Run every engine of a plan; each child runs its share one after another.

    Args:
        runs: what to run.
        folder: where plans, logs and results are kept; None takes a temporary one.
        num_children: processes at the same time; each pays for vLLM's import once and uses one core.
        timeout_s: for all of them.

    Raises:
        EngineError: a child ended with an error or was too slow; the text carries the end of its log.
        InputError: a name is used twice.
    """
    if folder is None:
        with TemporaryDirectory(prefix="deepinfer-engine-") as temporary:
            return run_engines(runs, Path(temporary), num_children=num_children, timeout_s=timeout_s)
    check_names(runs)
    deadline_s = time.monotonic() + timeout_s
    found: dict[str, RunResult] = {}
    with ExitStack() as stack:
        parts = [runs[first::num_children] for first in range(num_children)]
        children = [
            stack.enter_context(_Child(part, folder / f"child-{number}")) for number, part in enumerate(parts) if part
        ]
        for child in children:
            found.update(child.results(deadline_s))
    return {run.name: found[run.name] for run in runs}


def _read(path: Path) -> dict[str, RunResult]:
    """Results by engine; array names are ``engine/request/...``, so no name of ours holds a slash."""
    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        facts = json.loads(file.metadata()[FACTS_KEY])
    return {
        run: RunResult(
            facts=(run_facts := facts_from_json(value)),
            requests={
                name: RequestResult(
                    tokens=tuple(arrays[f"{run}/{name}/{i}/tokens"] for i in range(len(request.outputs))),
                    logits=tuple(arrays[f"{run}/{name}/{i}/logits"] for i in range(len(request.outputs))),
                    prompt_logits=arrays.get(f"{run}/{name}/prompt_logits"),
                    facts=request,
                )
                for name, request in run_facts.requests.items()
            },
        )
        for run, value in facts.items()
    }
