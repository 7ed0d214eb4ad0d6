"""Parent's side: start a child on a plan and hand back what it found, per engine and request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open

from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.plan import (
    FACTS_KEY,
    EngineRun,
    RequestFacts,
    RunFacts,
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


def run_engines(
    runs: Sequence[EngineRun], folder: Path | None = None, timeout_s: float = 900.0
) -> dict[str, RunResult]:
    """Run the engines one after another in one child process.

    Args:
        runs: what to run.
        folder: where plan, log and results are kept; None takes a temporary one.
        timeout_s: for the whole child.

    Raises:
        EngineError: the child ended with an error or was too slow; the text carries the end of its log.
    """
    if folder is None:
        with TemporaryDirectory(prefix="deepinfer-engine-") as temporary:
            return run_engines(runs, Path(temporary), timeout_s)
    plan, out, log = folder / "plan.json", folder / "results.safetensors", folder / "child.log"
    plan.write_text(json.dumps(runs_to_json(tuple(runs))), encoding="utf-8")
    command = [sys.executable, "-m", "deepinfer_plugin.engine_child.child", str(plan), str(out)]
    environment = envs.child_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"})
    with open(log, "wb") as sink:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        ending = f"ended with exit code {code}" if code is not None else f"was stopped after {timeout_s:.0f} s"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        raise EngineError(f"engine child: {ending}; its log ends\n" + "\n".join(tail))
    return _read(out)


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
