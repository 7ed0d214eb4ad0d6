"""Our model and vLLM's own on one configuration with random weights: same host, one after the other, alternated."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepinfer_plugin import envs
from deepinfer_plugin.bench.cases import Case, Figures
from deepinfer_plugin.bench.engine_timing import SLACK_TOKENS
from deepinfer_plugin.errors import EngineError

SIDES = ("ours", "vllm")
GRACE_S = 45.0
_STOPPED = 124  # as timeout(1) says it
_PROGRAM = "deepinfer_plugin.bench.engine_timing"
_OF_SIDE: dict[str, dict[str, Any]] = {
    "ours": {},
    # vLLM's model has a vision tower, which text does not need; its attention kernels take pages of 64 tokens.
    "vllm": {"limit_mm_per_prompt": {"image": 0}, "block_size": 64},
}


def run_side(
    side: str, config_dir: Path, cases: Sequence[Case], engine: dict[str, Any], log: Path, budget_s: float
) -> Figures:
    """Time one engine in a child process.

    Args:
        side: ``ours``, or ``vllm`` for vLLM's own model.
        config_dir: folder with config.json and a tokenizer; weights are random.
        cases: what to time, in order.
        engine: arguments of ``vllm.LLM`` beside the ones that both sides share.
        log: where the child's output goes.
        budget_s: seconds for start and cases; a case that no longer fits is left out, and a child that is still at work
            ``GRACE_S`` later is stopped. What was timed until then is returned.

    Raises:
        EngineError: the child ended before its engine had started.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, out = Path(folder, "plan.json"), Path(folder, "out.json")
        values = {
            "side": side,
            "engine": engine_arguments(side, config_dir, cases, engine),
            "vocab_size": _text_config(config_dir)["vocab_size"],
            "cases": [asdict(case) for case in cases],
            "budget_s": budget_s,
        }
        plan.write_text(json.dumps(values), encoding="utf-8")
        code = _run_child([sys.executable, "-m", _PROGRAM, str(plan), str(out)], side, log, budget_s + GRACE_S)
        if not out.is_file():
            raise EngineError(f"bench: the engine of side {side!r} ended with code {code}; its log is {log}")
        figures = Figures.from_json(json.loads(out.read_text(encoding="utf-8")))
    missing = [c.name for c in cases if c.name not in figures.tokens_per_s and c.name not in figures.not_run]
    reasons = dict.fromkeys(missing, f"the engine ended with code {code} before; its log is {log}")
    return replace(figures, not_run={**figures.not_run, **reasons})


def engine_arguments(side: str, config_dir: Path, cases: Sequence[Case], engine: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; ``engine`` has the last word."""
    longest = max(case.context + case.new_tokens for case in cases) + SLACK_TOKENS
    return {
        "model": str(config_dir),
        "load_format": "dummy",
        "max_model_len": -(-longest // 128) * 128,
        "max_num_seqs": max(case.num_requests for case in cases),
        "enable_prefix_caching": False,
        **_OF_SIDE[side],
        **engine,
    }


def _text_config(config_dir: Path) -> dict[str, Any]:
    content = json.loads((config_dir / "config.json").read_text(encoding="utf-8"))
    return dict(content["text_config"])


def _run_child(command: Sequence[str], side: str, log: Path, timeout_s: float) -> int:
    """Exit code of the child, which is stopped after ``timeout_s``, or when we are interrupted."""
    environment = envs.child_environment(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DEEPINFER_DISABLE": "1" if side == "vllm" else None}
    )
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        try:
            return child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return _STOPPED
        finally:
            child.kill()
            child.wait()


def table(rounds: Sequence[Figures]) -> str:
    """Medians over the rounds of each side, and the ratio ours / vLLM's, as a Markdown table."""
    by_side = {side: [figures for figures in rounds if figures.side == side] for side in SIDES}
    rows = ["| case | ours | vLLM's own | ratio |", "|---|---|---|---|"]
    names = dict.fromkeys(name for figures in rounds for name in (*figures.tokens_per_s, *figures.not_run))
    for name in names:
        values = [_median([f.tokens_per_s[name] for f in by_side[side] if name in f.tokens_per_s]) for side in SIDES]
        rows.append(_row(f"{name}, tokens/s", values, "{:,.0f}"))
    rows.append(_row("KV cache, tokens", [_median([f.kv_tokens for f in by_side[s]]) for s in SIDES], "{:,.0f}"))
    rows.append(_row("start, s", [_median([f.start_s for f in by_side[s]]) for s in SIDES], "{:.1f}"))
    for figures in rounds:
        rows += [f"not run, {figures.side}: {name}: {why}" for name, why in figures.not_run.items()]
    return "\n".join(rows)


def ratios(rounds: Sequence[Figures]) -> dict[str, float]:
    """Case to ours / vLLM's, medians over the rounds, for the cases that both sides ran."""
    found = {}
    for name in dict.fromkeys(name for figures in rounds for name in figures.tokens_per_s):
        ours, theirs = (
            _median([f.tokens_per_s[name] for f in rounds if f.side == side and name in f.tokens_per_s])
            for side in SIDES
        )
        if ours and theirs:
            found[name] = ours / theirs
    return found


def _row(name: str, values: Sequence[float | None], form: str) -> str:
    ours, theirs = values
    cells = ["not run" if value is None else form.format(value) for value in values]
    ratio = "" if not ours or not theirs else f"{ours / theirs:.2f}"
    return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
