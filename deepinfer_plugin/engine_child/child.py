"""The child: ``python -m deepinfer_plugin.engine_child.child PLAN.json OUT.safetensors``."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from deepinfer_plugin import envs
from deepinfer_plugin.engine_child.drafters import Answers, choose_lengths, inject
from deepinfer_plugin.engine_child.plan import (
    FACTS_KEY,
    Action,
    EngineRun,
    OutputFacts,
    Request,
    RequestFacts,
    RunFacts,
    runs_from_json,
)
from deepinfer_plugin.platforms.detect import platform_class
from deepinfer_plugin.reference.pictures import make_picture
from deepinfer_plugin.replay import counters
from deepinfer_plugin.speculative import schedule
from deepinfer_plugin.speculative.counters import VERIFICATION

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from deepinfer_plugin.engine_child.faults import Calls

DEFAULT_FLAGS = (
    "--max-model-len=512",
    "--max-num-batched-tokens=2048",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--gpu-memory-utilization=0.05",  # the cache has its size: this is only what must be free at start
    "--max-logprobs=-1",
    "--logprobs-mode=raw_logits",
    "--disable-log-stats",
)
# Without a step that computes something the engine is stuck. Not counted in steps: a fast machine takes a thousand of
# them while the child process that compiles grammars still imports.
MAX_IDLE_S = 120.0


@dataclass(slots=True)
class _Completion:
    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _State:
    """What has arrived of one request."""

    prompt: tuple[int, ...]
    completions: list[_Completion] = field(default_factory=list)
    internal_ids: list[str] = field(default_factory=list)
    prompt_rows: np.ndarray | None = None
    num_cached_tokens: int = 0
    draft_facts: list[dict[str, Any]] | None = None
    finished: bool = False
    error: str | None = None


class _Observer:
    """Reads what the scheduler decided, step by step; changes nothing."""

    def __init__(self, engine: LLMEngine) -> None:
        self.steps: list[dict[str, int]] = []
        self.preemptions: dict[str, int] = defaultdict(int)
        scheduler = engine.engine_core.engine_core.scheduler
        self._cache_manager = scheduler.kv_cache_manager
        self._schedule = scheduler.schedule
        scheduler.schedule = self._observed

    @property
    def kv_usage(self) -> float:
        """Share of the cache blocks that requests hold now."""
        return float(self._cache_manager.usage)

    def _observed(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = self._schedule(*args, **kwargs)
        self.steps.append(dict(output.num_scheduled_tokens))
        for request_id in output.preempted_req_ids or ():
            self.preemptions[request_id] += 1
        return output


class EngineDriver:
    """One engine and the requests it was given."""

    def __init__(self, run: EngineRun, answers: Answers) -> None:
        from vllm import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        flags = [f"--model={run.model}", *DEFAULT_FLAGS, *run.flags]
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        with _garbage_left_alone():
            self._engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        self._observer = _Observer(self._engine)
        self._answers = answers
        if run.drafter is not None:
            inject(self._engine, run.drafter, answers)
        if run.lengths is not None:
            choose_lengths(self._engine, run.lengths)
        self._states: dict[str, _State] = {}
        self._replay_before = counters.snapshot()
        schedule.FIGURES = schedule.ScheduleFigures()
        VERIFICATION.reset()

    def act(self, action: Action) -> None:
        """Carry out one action, then its engine steps."""
        if action.abort:
            self._engine.abort_request(list(action.abort))
        if action.reset_prefix_cache:
            assert self._engine.reset_prefix_cache(), "reset_prefix_cache: blocks are in use, expected an idle engine"
        if action.reset_image_caches:
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
        if action.sleep:
            self._engine.sleep(level=1)
            for part in ("weights", "kv_cache"):
                self._engine.wake_up([part])
        for request in action.add:
            self._add(request)
        done, computed_s = 0, time.monotonic()
        while self._engine.has_unfinished_requests() and (action.steps is None or done < action.steps):
            seen = len(self._observer.steps)
            for output in self._engine.step():
                self._take(output)
            done += 1
            if any(self._observer.steps[seen:]):
                computed_s = time.monotonic()
            idle_s = time.monotonic() - computed_s
            assert idle_s < MAX_IDLE_S, f"engine: it has computed nothing for {idle_s:.0f} s and is not done"

    def facts(self, start_s: float, run_s: float, faults: Mapping[str, Calls]) -> RunFacts:
        """What happened; array data is in ``arrays``."""
        names = {internal: name for name, state in self._states.items() for internal in state.internal_ids}
        steps: list[dict[str, int]] = []
        for computed in self._observer.steps:
            by_name: dict[str, int] = defaultdict(int)
            for internal, count in computed.items():
                by_name[names[internal]] += count
            steps.append(dict(by_name))
        return RunFacts(
            steps=tuple(steps),
            start_s=start_s,
            run_s=run_s,
            num_unfinished=self._engine.get_num_unfinished_requests(),
            kv_usage=self._observer.kv_usage,
            fault_calls={path: fault.calls for path, fault in faults.items()},
            observed={path: fault.seen for path, fault in faults.items() if fault.seen},
            requests={name: self._request_facts(state) for name, state in self._states.items()},
            replay=counters.since(self._replay_before),
            schedule=asdict(schedule.FIGURES),
            drafts=(figures := VERIFICATION.figures()).by_kind,
            confidence_error=figures.confidence_error,
        )

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays by name, see ``run.py``."""
        found: dict[str, np.ndarray] = {}
        for name, state in self._states.items():
            if state.prompt_rows is not None:
                found[f"{prefix}/{name}/prompt_logits"] = state.prompt_rows
            for index, completion in enumerate(state.completions):
                rows = completion.rows or [np.empty((0, self._vocab_size), dtype=np.float32)]
                found[f"{prefix}/{name}/{index}/tokens"] = np.asarray(completion.tokens, dtype=np.int64)
                found[f"{prefix}/{name}/{index}/logits"] = np.concatenate(rows)
        return found

    def close(self) -> None:
        """Keep its answers for drafters and stop it, so that ``collect_engine`` makes room for the next one."""
        for state in self._states.values():
            for completion in state.completions:
                self._answers.add(state.prompt, completion.tokens)
        with _garbage_left_alone():
            self._engine.engine_core.shutdown()

    def _add(self, request: Request) -> None:
        from vllm.exceptions import VLLMValidationError

        state = self._states[request.name] = _State(prompt=request.tokens)
        try:
            params = self._sampling_params(request)
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
            if request.images:
                prompt["multi_modal_data"] = {"image": [make_picture(recipe) for recipe in request.images]}
            internal = self._engine.add_request(request.name, prompt, params, priority=request.priority)
        except (ValueError, VLLMValidationError) as error:
            state.error = str(error)
            return
        state.completions = [_Completion() for _ in range(params.n)]
        state.internal_ids = [internal] if params.n == 1 else [f"{i}_{internal}" for i in range(params.n)]

    def _sampling_params(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        from deepinfer_plugin.sampling.extras import GOLDEN_TOKENS

        default = len(request.forced) + 1
        values: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": default if request.max_tokens is None else request.max_tokens,
            "ignore_eos": True,
            "flat_logprobs": True,
            "logprobs": -1,
            "output_kind": RequestOutputKind.DELTA,
        }
        if request.forced:
            values["extra_args"] = {GOLDEN_TOKENS: list(request.forced)}
        num_rows = len(request.tokens) - 1
        if request.prompt_rows and num_rows > 0:
            every = np.arange(self._vocab_size, dtype=np.int32)
            values["prompt_logprob_token_ids"] = np.broadcast_to(every, (num_rows, self._vocab_size))
        values.update(request.sampling)
        if "logit_bias" in values:  # JSON has made the token ids strings
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        if isinstance(values.get("structured_outputs"), dict):
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        return SamplingParams(**values)

    def _take(self, output: RequestOutput) -> None:
        state = self._states[output.request_id]
        if output.prompt_token_ids:
            state.prompt = tuple(output.prompt_token_ids)  # with the spans of images, as drafters meet it
        state.finished = output.finished
        state.draft_facts = output.draft_facts
        state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_token_id_logprobs is not None:
            state.prompt_rows = np.asarray(output.prompt_token_id_logprobs, dtype=np.float32)
        for part in output.outputs:
            completion = state.completions[part.index]
            completion.text += part.text
            completion.tokens += part.token_ids
            if part.token_ids:
                completion.produced.append(len(part.token_ids))
            completion.finish_reason, completion.stop_reason = part.finish_reason, part.stop_reason
            flat = part.logprobs
            if not flat:
                continue
            ids = np.asarray(flat.token_ids, dtype=np.int64).reshape(len(part.token_ids), -1)
            rows = np.full((len(ids), self._vocab_size), np.nan, dtype=np.float32)  # NaN: not asked for
            np.put_along_axis(rows, ids, np.asarray(flat.logprobs, dtype=np.float32).reshape(ids.shape), axis=1)
            completion.rows.append(rows)

    def _request_facts(self, state: _State) -> RequestFacts:
        return RequestFacts(
            outputs=tuple(
                OutputFacts(text=c.text, finish_reason=c.finish_reason, stop_reason=c.stop_reason)
                for c in state.completions
            ),
            num_cached_tokens=state.num_cached_tokens,
            num_preemptions=sum(self._observer.preemptions[internal] for internal in state.internal_ids),
            chunks=tuple(
                tuple(step[internal] for step in self._observer.steps if internal in step)
                for internal in state.internal_ids
            ),
            draft_facts=None if state.draft_facts is None else tuple(state.draft_facts),
            produced=tuple(tuple(completion.produced) for completion in state.completions),
            finished=state.finished,
            error=state.error,
        )


def load_vllm() -> None:
    """Import what an engine is made of, without looking for garbage meanwhile: that took a quarter of the time."""
    gc.disable()
    from vllm import EngineArgs  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    gc.enable()
    gc.freeze()


def collect_engine() -> None:
    """Free a closed engine, to which nothing points any more but itself; modules that it imported stay for good."""
    gc.collect()
    gc.freeze()


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Keep vLLM from searching a million objects of imported modules, twice as an engine starts and twice as it stops.

    It freezes the engine with all the rest and thaws all the rest with the engine; here the rest stays frozen.
    """
    with ExitStack() as stack:
        for name in ("collect", "freeze", "unfreeze"):
            stack.enter_context(mock.patch.object(gc, name))
        yield


def run_engine(run: EngineRun, answers: Answers) -> tuple[RunFacts, dict[str, np.ndarray]]:
    """Build the engine, carry out its actions, stop it."""
    envs.set_variable("DEEPINFER_ARITHMETIC", run.arithmetic.value)
    begin_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(envs.variables_set(run.variables))
        driver = EngineDriver(run, answers)
        stack.callback(driver.close)
        faults = {path: stack.enter_context(_load(path)()) for path in run.faults}
        started_s = time.monotonic()
        for action in run.actions:
            driver.act(action)
        run_s = time.monotonic() - started_s
        return driver.facts(started_s - begin_s, run_s, faults), driver.arrays(run.name)


def main(plan: Path, out: Path) -> None:
    """Run every engine of the plan and write the results."""
    platform_class()  # before torch, Triton and vLLM are imported
    load_vllm()
    from safetensors.numpy import save_file

    facts: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    answers = Answers()
    for run in runs_from_json(json.loads(plan.read_text(encoding="utf-8"))):
        run_facts, run_arrays = run_engine(run, answers)
        facts[run.name] = asdict(run_facts)
        arrays.update(run_arrays)
        collect_engine()
    save_file(arrays, out, metadata={FACTS_KEY: json.dumps(facts)})


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
