"""Runs records through vLLM's engine and hands back one array per record, row i = what follows token i."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_plugin.engine_errors import vllm_may_fail
from deepinfer_plugin.errors import EngineError
from deepinfer_plugin.scoring.inputs import Record

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

LENGTH_STEP = 128  # max_model_len is a multiple of it
CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the records are scored; ``top`` None means the whole vocabulary."""

    model: Path
    vocab_size: int
    top: int | None
    raw_logits: bool
    is_cpu: bool
    engine_flags: tuple[str, ...]


@dataclass(slots=True)
class _Rows:
    """What has arrived of one record: full rows, or the chosen token and the top ones."""

    record: Record
    prompt_rows: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)


def build_engine(plan: Plan, records: Sequence[Record]) -> LLMEngine:
    """Start vLLM on the checkpoint.

    Raises:
        EngineError: vLLM did not start; its own log says more.
    """
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    longest = max(len(record.tokens) for record in records) + 1
    flags = [
        f"--model={plan.model}",
        f"--max-model-len={math.ceil(longest / LENGTH_STEP) * LENGTH_STEP}",
        f"--max-logprobs={-1 if plan.top is None else plan.top}",
        f"--logprobs-mode={'raw_logits' if plan.raw_logits else 'raw_logprobs'}",
        "--max-num-seqs=16",
        *([f"--kv-cache-memory-bytes={CPU_KV_CACHE_BYTES}"] if plan.is_cpu else []),
        *plan.engine_flags,
    ]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="score … --"))
    arguments = EngineArgs.from_cli_args(parser.parse_args(flags))
    with vllm_may_fail("score", "did not start"):
        return LLMEngine.from_engine_args(arguments)


def score(
    engine: LLMEngine, plan: Plan, records: Sequence[Record], on_tokens: Callable[[int], object]
) -> Iterator[tuple[Record, dict[str, np.ndarray]]]:
    """Yield each record with its arrays as soon as it is finished, in the order in which records finish.

    Args:
        engine: from ``build_engine``.
        plan: the one the engine was built with.
        records: what to score.
        on_tokens: called with the number of rows that have newly arrived.

    Raises:
        EngineError: vLLM stopped.
    """
    waiting = list(reversed(records))
    running: dict[str, _Rows] = {}
    at_once = engine.vllm_config.scheduler_config.max_num_seqs
    while waiting or running:
        with vllm_may_fail("score", "stopped"):
            while waiting and len(running) < at_once:
                record = waiting.pop()
                running[record.name] = _Rows(record)
                engine.add_request(record.name, {"prompt_token_ids": record.prompt}, _sampling_params(plan, record))
            outputs = engine.step()
        for output in outputs:
            state = running[output.request_id]
            on_tokens(_take(plan, state, output))
            if output.finished:
                del running[output.request_id]
                yield state.record, _arrays(plan, state)


def _sampling_params(plan: Plan, record: Record) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from deepinfer_plugin.sampling.extras import GOLDEN_TOKENS

    prompt: dict[str, Any] = {}
    num_rows = record.decode_from - 1  # the row of the last prompt token comes with the first output token
    if num_rows > 0 and plan.top is None:
        # every id of every row, as one array: vLLM's list of all log-probabilities takes 30 times the memory
        every = np.arange(plan.vocab_size, dtype=np.int32)
        prompt["prompt_logprob_token_ids"] = np.broadcast_to(every, (num_rows, plan.vocab_size))
    elif num_rows > 0:
        prompt["prompt_logprobs"] = plan.top
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(record.continuation) + 1,
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        logprobs=-1 if plan.top is None else plan.top,
        output_kind=RequestOutputKind.DELTA,
        skip_reading_prefix_cache=True,
        extra_args={GOLDEN_TOKENS: record.continuation} if record.continuation else None,
        **prompt,
    )


def _take(plan: Plan, state: _Rows, output: RequestOutput) -> int:
    """Move what a step brought into ``state``; returns the number of rows."""
    num_rows = 0
    if output.prompt_token_id_logprobs is not None:
        state.prompt_rows = [np.asarray(output.prompt_token_id_logprobs, dtype=np.float32)]
        num_rows += len(state.prompt_rows[0])
    if output.prompt_logprobs:
        num_rows += _take_flat(plan, state, output.prompt_logprobs)
    for completion in output.outputs:
        if completion.logprobs:
            num_rows += _take_flat(plan, state, completion.logprobs)
    return num_rows


def _take_flat(plan: Plan, state: _Rows, flat: Any) -> int:
    """Read vLLM's flat form: per position the chosen token, then the most likely ones."""
    num_rows = 0
    for begin, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if begin == end:  # the first prompt token has no row
            continue
        num_rows += 1
        ids = np.asarray(flat.token_ids[begin:end], dtype=np.int32)
        values = np.asarray(flat.logprobs[begin:end], dtype=np.float32)
        if plan.top is None:
            row = np.empty(plan.vocab_size, dtype=np.float32)
            row[ids] = values
            state.rows.append(row)
            continue
        state.chosen.append(float(values[0]))
        state.ids.append(ids[1 : plan.top + 1])
        state.rows.append(values[1 : plan.top + 1])
    return num_rows


def _arrays(plan: Plan, state: _Rows) -> dict[str, np.ndarray]:
    kind = "logits" if plan.raw_logits else "logprobs"
    tokens = np.asarray(state.record.tokens, dtype=np.int64)
    num_rows = sum(map(len, state.prompt_rows)) + len(state.rows)
    if num_rows != len(tokens):
        raise EngineError(
            f"score: {state.record.name!r} has {num_rows} rows, expected {len(tokens)}; this is a fault of ours"
        )
    if plan.top is None:
        return {"tokens": tokens, kind: np.concatenate([*state.prompt_rows, np.stack(state.rows)])}
    return {
        "tokens": tokens,
        f"token_{kind}": np.asarray(state.chosen[:-1], dtype=np.float32),  # of token i + 1 in row i
        "top_ids": np.stack(state.ids),
        f"top_{kind}": np.stack(state.rows),
    }
