"""Times one engine: ``python -m deepinfer_plugin.bench.engine_timing PLAN.json OUT.json`` in a process of its own."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from deepinfer_plugin.bench.cases import DECODE_STEPS, DECODE_WINDOWS, Case, Figures

if TYPE_CHECKING:
    import torch
    from vllm import LLM, SamplingParams

PREFILL_REPEATS = 3
WARM_STEPS = 4
SLACK_TOKENS = 1024
"""Tokens that early requests may make while later ones are prefilled, above a case's context."""
CASE_OVERHEAD_S = 10.0
"""Warm-up and decode steps of a case, beside its prefill: what the rest of the budget must hold."""
WEIGHT_SEED = 7


def fill_packed_weights(model: torch.nn.Module) -> int:
    """Random codes and moderate scales for packed weights, which vLLM's dummy loader leaves as they are or near zero.

    All-zero weights run faster on the card than real ones and would flatter the figures.

    Returns:
        Number of parameters filled.
    """
    import torch

    generator = torch.Generator(device=next(model.parameters()).device)
    filled = 0
    for name, parameter in model.named_parameters():
        generator.manual_seed(WEIGHT_SEED + crc32(name.encode()))  # ranks that hold the whole tensor hold the same
        if parameter.dtype == torch.float8_e4m3fn:
            codes = parameter.data.view(torch.uint8)
            codes.random_(0, 120, generator=generator)  # magnitudes up to 240, never the code of NaN
            codes.bitwise_or_(torch.empty_like(codes).random_(0, 2, generator=generator).mul_(128))
        elif parameter.dtype == torch.uint8:
            low, high = (118, 122) if "scale" in name else (0, 256)
            parameter.data.random_(low, high, generator=generator)
        else:
            continue
        filled += 1
    return filled


def _prompts(case: Case, vocab_size: int, seed: int) -> list[Any]:
    draw = random.Random(f"{case.name} {seed}")
    return [
        {"prompt_token_ids": [draw.randrange(3, vocab_size) for _ in range(case.context)]}
        for _ in range(case.num_requests)
    ]


def _greedy(max_tokens: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def time_prefill(llm: LLM, case: Case, vocab_size: int) -> float:
    """Prompt tokens per second, median of ``PREFILL_REPEATS`` runs on fresh prompts, after one that is not counted."""
    rates = []
    for repeat in range(PREFILL_REPEATS + 1):
        prompts, params = _prompts(case, vocab_size, repeat), _greedy(1)
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rates.append(case.num_requests * case.context / (time.perf_counter() - begin_s))
        assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
    return sorted(rates[1:])[PREFILL_REPEATS // 2]


def time_decode(llm: LLM, case: Case, vocab_size: int) -> tuple[float, float]:
    """New tokens per second once every request decodes, median of the windows; and the seconds until then."""
    engine = llm.llm_engine
    params = _greedy(case.new_tokens + SLACK_TOKENS)
    begin_s = time.perf_counter()
    names = [
        engine.add_request(f"{case.name} {index}", prompt, params)
        for index, prompt in enumerate(_prompts(case, vocab_size, 0))
    ]
    started: set[str] = set()
    while len(started) < case.num_requests:
        started.update(output.request_id for output in engine.step() if output.outputs[0].token_ids)
    prefill_s = time.perf_counter() - begin_s
    _decode_seconds(engine, case.num_requests * WARM_STEPS)
    num_tokens = case.num_requests * DECODE_STEPS
    rates = sorted(num_tokens / _decode_seconds(engine, num_tokens) for _ in range(DECODE_WINDOWS))
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return rates[DECODE_WINDOWS // 2], prefill_s


def _decode_seconds(engine: Any, num_tokens: int) -> float:
    """Seconds per ``num_tokens`` tokens, taken over whole steps."""
    made, begin_s = 0, time.perf_counter()
    while made < num_tokens:
        made += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return (time.perf_counter() - begin_s) * num_tokens / made


class _Run:
    """The cases of one engine within a budget; figures are written after each, so a stop keeps them."""

    def __init__(self, plan: dict[str, Any], out_path: Path, begin_s: float) -> None:
        from vllm import LLM

        self._out_path = out_path
        self._end_s = begin_s + plan["budget_s"]
        self._vocab_size = int(plan["vocab_size"])
        start_s = time.perf_counter()
        self._llm = LLM(**plan["engine"])
        start_s = time.perf_counter() - start_s
        if plan["side"] == "ours" and plan["engine"]["load_format"] == "dummy":
            self._llm.apply_model(fill_packed_weights)
        config = self._llm.llm_engine.vllm_config
        self._max_model_len = int(config.model_config.max_model_len)
        kv_tokens = int(config.cache_config.kv_cache_size_tokens or 0)
        self._figures = Figures(side=plan["side"], start_s=start_s, kv_tokens=kv_tokens)
        self._prefill_rate = 0.0
        self._write()

    def _write(self) -> None:
        self._out_path.write_text(json.dumps(self._figures.to_json(), indent=2) + "\n", encoding="utf-8")

    def _refusal(self, case: Case) -> str | None:
        """Why a case cannot be timed, or None."""
        length = case.context + (1 if case.is_prefill else case.new_tokens + SLACK_TOKENS)
        if length > self._max_model_len:
            return f"needs requests of {length} tokens, max_model_len is {self._max_model_len}"
        needed = case.num_requests * length
        if needed > self._figures.kv_tokens:
            return f"needs {needed} cached tokens, the cache holds {self._figures.kv_tokens}"
        left_s = self._end_s - time.perf_counter()
        runs = PREFILL_REPEATS + 1 if case.is_prefill else 1
        expected_s = CASE_OVERHEAD_S
        if self._prefill_rate > 0:
            expected_s += runs * case.num_requests * case.context / self._prefill_rate
        return f"needs about {expected_s:.0f} s, {max(left_s, 0):.0f} s are left" if expected_s > left_s else None

    def time(self, case: Case) -> None:
        """Time one case, or note why not."""
        why = self._refusal(case)
        if why is not None:
            self._figures = replace(self._figures, not_run={**self._figures.not_run, case.name: why})
        else:
            if case.is_prefill:
                rate = self._prefill_rate = time_prefill(self._llm, case, self._vocab_size)
            else:
                rate, prefill_s = time_decode(self._llm, case, self._vocab_size)
                if self._prefill_rate == 0:
                    self._prefill_rate = case.num_requests * case.context / prefill_s
            self._figures = replace(self._figures, tokens_per_s={**self._figures.tokens_per_s, case.name: rate})
        self._write()


def main(plan_path: Path, out_path: Path) -> None:
    """Build the engine, time every case that the budget and the cache hold."""
    begin_s = time.perf_counter()
    plan = json.loads(plan_path.read_text(encoding="utf-8"))
    run = _Run(plan, out_path, begin_s)
    for values in plan["cases"]:
        run.time(Case(**values))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
