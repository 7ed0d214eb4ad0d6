"""One row per feature of DeepInfer, F1-F28, and our own: its state on our model, why, and who decided. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["on", "off", "not built"]
ON: State = "on"
OFF: State = "off"
NOT_BUILT: State = "not built"

VLLM, PLUGIN, REQUEST = "vLLM", "plugin", "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One feature as our model has it. ``decided_by`` is vLLM, the plugin or the request."""

    key: str
    name: str
    state: State
    why: str
    decided_by: str


def _row(key: str, name: str, state: State, why: str, decided_by: str = PLUGIN) -> Row:
    return Row(key=key, name=name, state=state, why=why, decided_by=decided_by)


ROWS: tuple[Row, ...] = (
    _row("F1", "DSpark drafting", OFF, "tokens, scores and their bits are the same with drafts and without"),
    _row("F2", "confidence-scheduled verification", OFF, "DEEPINFER_ENABLE_MTP_VARLEN; never changes an answer"),
    _row("F3", "confidence temperature", ON, "divides the score of every draft before it becomes a confidence"),
    _row("F4", "decode-time curve cache", OFF, "DEEPINFER_DECODE_PERF_CACHE_DIR names its folder; used with F2"),
    _row("F5", "decoder bounded replay", ON, "follows the settings, see replay/status_rows.py"),
    _row("F6", "replay length", ON, "follows the settings, see replay/status_rows.py"),
    _row("F7", "encoder bounded replay", OFF, "follows the settings, see replay/status_rows.py"),
    _row(
        "F8",
        "asynchronous scheduling",
        ON,
        "vLLM's default on a GPU; on the CPU off, on with async_scheduling_on_cpu in --additional-config; "
        "max_concurrent_batches there: steps at once, 2 to 4",
        VLLM,
    ),
    _row("F9", "batch invariance", ON, "every operation of a forward pass is proven at start, or the start stops"),
    _row(
        "F10",
        "deterministic sampling",
        ON,
        "noise is a function of (seed, prompt, position, token); a request without seed gets one",
        REQUEST,
    ),
    _row("F11", "structured output", ON, "XGrammar; with our model also so_args, and limits on compiling", VLLM),
    _row("F12", "grammar trigger and bound token ids", ON, "trigger_token_ids and bound_token_id of so_args", REQUEST),
    _row(
        "F13", "expert parallelism, EPLB", OFF, "--enable-eplb moves experts between ranks; no bit of an answer changes"
    ),
    _row("F14", "attention DP, context parallelism", NOT_BUILT, "--data-parallel-size works; no context parallelism"),
    _row("F15", "Engram placement", ON, "tables stay on the model's device"),
    _row("F16", "packed KV formats", ON, "window MXFP8 528 B, compressed NVFP4 288 B, index MXFP4 68 B"),
    _row("F17", "forced top-k sampling", ON, "force_top_k of a request, else DEEPINFER_SAMPLER_FORCE_TOPK", REQUEST),
    _row("F18", "token blacklist", ON, "token_blacklist of a request and DEEPINFER_DECODE_TOKEN_BLACKLIST", REQUEST),
    _row(
        "F19",
        "sum of smaller probabilities",
        ON,
        "sum_smaller_probs of a request, else DEEPINFER_COMPUTE_SUM_SMALLER_PROBS",
        REQUEST,
    ),
    _row("F20", "golden tokens", ON, "golden_token_ids of a request; score --decode-from", REQUEST),
    _row("F21", "draft facts by step", ON, "draft_facts of a request; deepinfer_draft_* on /metrics", REQUEST),
    _row("F22", "engine statistics", ON, "a line per interval of steps and deepinfer_* on /metrics, beside vLLM's own"),
    _row("F23", "on-demand traces", ON, "vLLM's --profiler-config", VLLM),
    _row("F24", "prefill pacing", NOT_BUILT, "vLLM mixes prefill and decode in one step", VLLM),
    _row("F25", "prefill context cap", ON, "context_cap of a request; --max-num-batched-tokens bounds a step", REQUEST),
    _row("F26", "request encoding", ON, "deepseek-recipe's rendering; text of messages never forms control tokens"),
    _row("F27", "evaluation and sweep", ON, "python -m deepinfer_evals; python -m deepinfer_plugin bench sweep"),
    _row(
        "F28",
        "kernel cache root",
        ON,
        "DEEPINFER_JIT_CACHE_DIR: all compiled at start; unset: when needed",
    ),
    _row("X1", "images", ON, "image_url of a request; --limit-mm-per-prompt '{\"image\": 0}' drops the tower", VLLM),
    _row("X2", "prefix caching", ON, "what a hit computes again is F7; --no-enable-prefix-caching", VLLM),
    _row("X3", "kernels of a GPU", ON, "Triton; five operations in TileLang with DEEPINFER_KERNEL_SET=tilelang"),
)
