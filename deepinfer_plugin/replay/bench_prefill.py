"""Prefill through the engine with and without decoder replay, in one process: ``python -m ….replay.bench_prefill``.

A model with the released 20 + 20 layers at a small width, one prompt after another. The two engines take turns, so
that a change of the machine's load meets both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deepinfer_plugin import envs
from deepinfer_plugin.platforms.detect import platform_class
from deepinfer_plugin.replay import counters
from deepinfer_plugin.replay.settings import KEEP_VARIABLE, MODE_VARIABLE

if TYPE_CHECKING:
    from vllm import LLM

TARGET_RATIO = 0.60
VOCAB_SIZE = 512
MODES = ("off", "compact")


def _engine(model: Path, mode: str, keep_tokens: int, num_tokens: int) -> LLM:
    from vllm import LLM

    with envs.variables_set({MODE_VARIABLE: mode, KEEP_VARIABLE: str(keep_tokens)}):
        return LLM(
            model=str(model),
            max_model_len=num_tokens + 16,
            max_num_batched_tokens=num_tokens + 16,
            max_num_seqs=2,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )


def _seconds(llm: LLM, num_tokens: int, seed: int) -> float:
    from vllm import SamplingParams

    draw = random.Random(seed)
    prompt = {"prompt_token_ids": [draw.randrange(3, VOCAB_SIZE - 3) for _ in range(num_tokens)]}
    begin_s = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begin_s


def measure(model: Path, num_tokens: int, keep_tokens: int, repeats: int) -> dict[str, object]:
    """Seconds of every prefill by mode, decoder rows per prompt, and the ratio of the medians."""
    engines = {mode: _engine(model, mode, keep_tokens, num_tokens) for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rows: dict[str, list[int]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):
        for mode, engine in engines.items():
            before = counters.snapshot()
            elapsed_s = _seconds(engine, num_tokens, seed=repeat)
            if repeat > 0:  # the first one warms up
                seconds[mode].append(elapsed_s)
                rows[mode].append(counters.since(before)["decoder_rows"])
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    return {
        "num_tokens": num_tokens,
        "keep_tokens": keep_tokens,
        "seconds": seconds,
        "decoder_rows": rows,
        "ratio": medians["compact"] / medians["off"],
        "target_ratio": TARGET_RATIO,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description="Time of a prefill with compact, over the time with off.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--keep", type=int, default=140)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="deep", choices=("deep", "tiny", "nano"))
    arguments = parser.parse_args()
    envs.keep_engine_in_this_process()
    platform_class()  # before torch, Triton and vLLM are imported
    from deepinfer_plugin.reference.tiny import write_checkpoint

    with TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        write_checkpoint(arguments.model, 0, folder)
        result = measure(Path(folder), arguments.tokens, arguments.keep, arguments.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
