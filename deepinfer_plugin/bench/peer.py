"""Our model and vLLM's own on one configuration with random weights: same host, one after the other, alternated."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_plugin import envs
from deepinfer_plugin.bench.cases import Case, Figures
from deepinfer_plugin.errors import EngineError

SIDES = ("ours", "vllm")
_PROGRAM = "deepinfer_plugin.bench.engine_timing"


def run_side(side: str, config_dir: Path, cases: Sequence[Case], engine: dict[str, Any], log: Path) -> Figures:
    """Time one engine in a child process.

    Args:
        side: ``ours``, or ``vllm`` for vLLM's own model.
        config_dir: folder with config.json and a tokenizer; weights are random.
        cases: what to time.
        engine: arguments of ``vllm.LLM`` beside the ones that both sides share.
        log: where the child's output goes.

    Raises:
        EngineError: the child ended before it had timed anything.
    """
    vocab_size = json.loads((config_dir / "config.json").read_text(encoding="utf-8"))["text_config"]["vocab_size"]
    longest = max(case.context + case.new_tokens for case in cases)
    arguments: dict[str, Any] = {
        "model": str(config_dir),
        "load_format": "dummy",
        "max_model_len": -(-longest // 128) * 128,
        "max_num_seqs": max(case.num_requests for case in cases),
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 0},
        **engine,
    }
    if side == "ours":
        del arguments["limit_mm_per_prompt"]  # our model takes text only
    with tempfile.TemporaryDirectory() as folder:
        plan, out = Path(folder, "plan.json"), Path(folder, "out.json")
        plan.write_text(
            json.dumps(
                {
                    "side": side,
                    "engine": arguments,
                    "vocab_size": vocab_size,
                    "cases": [asdict(case) for case in cases],
                }
            ),
            encoding="utf-8",
        )
        child = envs.child_environment(
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DEEPINFER_DISABLE": "1" if side == "vllm" else None}
        )
        with log.open("w", encoding="utf-8") as stream:
            code = subprocess.run(
                [sys.executable, "-m", _PROGRAM, str(plan), str(out)],
                env=child,
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if not out.is_file():
            raise EngineError(f"bench: the engine of side {side!r} ended with code {code}; its log is {log}")
        return Figures.from_json(json.loads(out.read_text(encoding="utf-8")))


def table(rounds: Sequence[Figures]) -> str:
    """Medians over the rounds of each side, and the ratio ours / vLLM's, as a Markdown table."""
    by_side = {side: [figures for figures in rounds if figures.side == side] for side in SIDES}
    rows = ["| case | ours | vLLM's own | ratio |", "|---|---|---|---|"]
    names = [name for figures in rounds[:1] for name in figures.tokens_per_s]
    for name in names:
        values = [_median([f.tokens_per_s[name] for f in by_side[side] if name in f.tokens_per_s]) for side in SIDES]
        rows.append(_row(f"{name}, tokens/s", values, "{:,.0f}"))
    rows.append(_row("KV cache, tokens", [_median([f.kv_tokens for f in by_side[s]]) for s in SIDES], "{:,.0f}"))
    rows.append(_row("start, s", [_median([f.start_s for f in by_side[s]]) for s in SIDES], "{:.1f}"))
    return "\n".join(rows)


def _row(name: str, values: Sequence[float | None], form: str) -> str:
    ours, theirs = values
    cells = ["not run" if value is None else form.format(value) for value in values]
    ratio = "" if not ours or not theirs else f"{ours / theirs:.2f}"
    return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
