"""Times one engine: ``python -m deepinfer_plugin.bench.engine_timing PLAN.json OUT.json`` in a process of its own."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.bench.cases import Case, Figures

if TYPE_CHECKING:
    import torch
    from vllm import LLM

REPEATS = 3
WEIGHT_SEED = 7


def fill_packed_weights(model: torch.nn.Module) -> int:
    """Random codes and moderate scales for packed weights, which vLLM's dummy loader leaves as they are.

    All-zero weights run faster on the card than real ones and would flatter the figures.

    Returns:
        Number of parameters filled.
    """
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(WEIGHT_SEED)
    filled = 0
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.uint8:
            continue
        low, high = (118, 122) if "scale" in name else (0, 256)
        parameter.data.random_(low, high, generator=generator)
        filled += 1
    return filled


def time_case(llm: LLM, case: Case, vocab_size: int) -> float:
    """Tokens per second, median of ``REPEATS`` runs on fresh prompts."""
    rates = sorted(_rate(llm, case, vocab_size, repeat) for repeat in range(REPEATS))
    return rates[REPEATS // 2]


def _rate(llm: LLM, case: Case, vocab_size: int, repeat: int) -> float:
    if case.is_prefill:
        return case.num_requests * case.context / _seconds(llm, case, vocab_size, repeat, 1)
    # both runs prefill equally long prompts; what is left is the time of the further tokens
    whole = _seconds(llm, case, vocab_size, 2 * repeat, case.new_tokens)
    first = _seconds(llm, case, vocab_size, 2 * repeat + 1, 1)
    return case.num_requests * (case.new_tokens - 1) / max(whole - first, 1e-9)


def _seconds(llm: LLM, case: Case, vocab_size: int, seed: int, new_tokens: int) -> float:
    from vllm import SamplingParams

    draw = random.Random(f"{case.name} {seed}")
    prompts: list[Any] = [
        {"prompt_token_ids": [draw.randrange(3, vocab_size) for _ in range(case.context)]}
        for _ in range(case.num_requests)
    ]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - begin_s
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
    return elapsed_s


def main(plan_path: Path, out_path: Path) -> None:
    """Build the engine, warm it up, time every case; figures are written after each, so a stop keeps them."""
    plan = json.loads(plan_path.read_text(encoding="utf-8"))
    from vllm import LLM

    begin_s = time.perf_counter()
    llm = LLM(**plan["engine"])
    start_s = time.perf_counter() - begin_s
    if plan["side"] == "ours":
        llm.apply_model(fill_packed_weights)
    config = llm.llm_engine.vllm_config
    vocab_size = int(plan["vocab_size"])
    kv_tokens = int(getattr(config.cache_config, "kv_cache_size_tokens", 0) or 0)
    rates: dict[str, float] = {}
    for values in plan["cases"]:
        case = Case(**values)
        _seconds(llm, case, vocab_size, -1, 2)
        rates[case.name] = time_case(llm, case, vocab_size)
        figures = Figures(side=plan["side"], start_s=start_s, kv_tokens=kv_tokens, tokens_per_s=rates)
        out_path.write_text(json.dumps(figures.to_json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
