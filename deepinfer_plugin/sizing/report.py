"""A plan for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.sizing.devices import Gpu
from deepinfer_plugin.sizing.loads import Mix
from deepinfer_plugin.sizing.memory import ENGRAM, KVPool
from deepinfer_plugin.sizing.plan import GIB, Memory, Options, Plan
from deepinfer_plugin.sizing.steps import Layout, StepModel


def flags(layout: Layout, plan: Plan, mix: Mix, options: Options) -> list[str]:
    """Arguments of ``vllm serve`` for a plan."""
    found = [f"--tensor-parallel-size={layout.tensor}"]
    if layout.replicas > 1:
        found.append(f"--data-parallel-size={layout.replicas}")
    if layout.shares_experts:
        found.append("--enable-expert-parallel")
    found.append(f"--max-model-len={mix.longest}")
    found += [f"--max-num-seqs={plan.batch}", f"--max-num-batched-tokens={options.step_tokens}"]
    found.append(f"--gpu-memory-utilization={options.utilization:g}")
    if not options.has_images:
        found.append('--limit-mm-per-prompt={"image":0}')
    if options.num_drafts:
        found.append(f'--speculative-config={{"method":"dspark","num_speculative_tokens":{options.num_drafts}}}')
    return found


def name_of(layout: Layout) -> str:
    """TP 4 x DP 2, shared experts."""
    name = f"TP {layout.tensor}" + (f" x DP {layout.replicas}" if layout.replicas > 1 else "")
    return name + (" + EP" if layout.shares_experts else "")


def to_json(config: ModelConfig, gpu: Gpu, mix: Mix, options: Options, plans: Sequence[Plan]) -> dict[str, Any]:
    """Everything; times in microseconds, memory in bytes."""
    return {
        "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib, "is_measured": gpu.is_measured},
        "loads": [{"prompt": load.prompt, "answer": load.answer, "rate": load.rate} for load in mix.loads],
        "kv_bytes_per_token": KVPool.of(config, options.num_drafts, options.replay).bytes_per_token,
        "plans": [_plan_json(config, gpu, mix, options, plan) for plan in plans],
    }


def _plan_json(config: ModelConfig, gpu: Gpu, mix: Mix, options: Options, plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    model = StepModel(config=config, gpu=gpu, layout=layout)
    memory = plan.memory
    return {
        "layout": name_of(layout),
        "tensor_parallel_size": layout.tensor,
        "data_parallel_size": layout.replicas,
        "expert_ranks": layout.expert_ranks,
        "refusal": plan.refusal,
        "flags": [] if plan.refusal else flags(layout, plan, mix, options),
        "memory": None if memory is None else memory_json(memory),
        "kv_tokens": plan.kv_tokens,
        "most_requests": plan.most_requests,
        "requests": plan.requests,
        "decode_us": plan.decode_us,
        "token_us": _token_us(plan, options),
        "decode_parts": {part: {"us": us, "source": model.source_of(part)} for part, us in plan.decode_parts.items()},
        "first_token_us": dict(plan.first_token_us),
        "prefill_share": plan.prefill_share,
        "factor": plan.factor,
    }


def memory_json(memory: Memory) -> dict[str, Any]:
    """Bytes of one GPU, which add up to ``total``."""
    parts = {**memory.weights, "runtime": memory.runtime, "activations": memory.activations}
    return {"total": memory.total, "parts": {**parts, "KV cache": memory.kv, "left unused": memory.unused}}


def _token_us(plan: Plan, options: Options) -> float | None:
    """Between two tokens of a request while prompts take their share."""
    if plan.prefill_share >= 1.0 or not plan.decode_us:
        return None
    return plan.decode_us / options.tokens_per_step / (1.0 - plan.prefill_share)


def to_text(config: ModelConfig, gpu: Gpu, mix: Mix, options: Options, plans: Sequence[Plan]) -> str:
    """The layouts as a table, then the best one in detail."""
    total = ", ".join(f"{load.rate:g} requests/s of {load.prompt} + {load.answer} tokens" for load in mix.loads)
    lines = [
        f"{plans[0].layout.num_gpus} x {gpu.name} ({gpu.memory_gib:g} GiB); {total}",
        "",
        _cells("layout", "KV tokens", "requests", "first token", "a token", "prefill", "carries"),
        _cells("", "", "at a time / most", "ms", "ms", "of time", "load x"),
    ]
    lines += [_row(plan, options) for plan in plans]
    best = plans[0]
    if best.refusal is None:
        lines += ["", *_detail(config, gpu, mix, options, best)]
    return "\n".join(lines)


def _row(plan: Plan, options: Options) -> str:
    if plan.refusal is not None:
        return f"{name_of(plan.layout):20} no: {plan.refusal}"
    at_a_time = "–" if plan.requests is None else f"{plan.requests * plan.layout.replicas:,.1f}"
    token_us = _token_us(plan, options)
    token = "–" if token_us is None else f"{token_us / 1000:,.1f}"
    first = max(plan.first_token_us.values()) / 1000
    most = plan.most_requests * plan.layout.replicas
    return _cells(
        name_of(plan.layout),
        f"{plan.kv_tokens:,}",
        f"{at_a_time} / {most}",
        f"{first:,.0f}",
        token,
        f"{plan.prefill_share:.0%}",
        f"{plan.factor:.2f}",
    )


def _cells(layout: str, *values: str) -> str:
    widths = (13, 17, 12, 9, 8, 9)
    return f"{layout:20} " + " ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _detail(config: ModelConfig, gpu: Gpu, mix: Mix, options: Options, plan: Plan) -> list[str]:
    layout, memory = plan.layout, plan.memory
    assert memory is not None, "a plan without refusal has its memory"
    model = StepModel(config=config, gpu=gpu, layout=layout)
    lines = [f"{name_of(layout)}: vllm serve … {shlex.join(flags(layout, plan, mix, options))}"]
    if plan.factor < 1.0:
        lines.append(f"  does not carry the load: {plan.factor:.2f} of it at most; take more GPUs")
    lines.append(f"  memory of one GPU, {memory.total / GIB:.1f} GiB")
    lines += [f"    {part:16} {size / GIB:8.2f}" for part, size in memory_json(memory)["parts"].items()]
    if config.engram_layer_ids:
        tables = memory.weights[ENGRAM] / GIB
        where = f"cut over the {layout.tensor} rank(s) of a replica"
        lines.append(f"  Engram tables: in device memory, {tables:.1f} GiB a GPU, {where}")
    requests = plan.requests if plan.requests is not None else float(plan.most_requests)
    lines.append(f"  decode step of {requests:,.1f} requests a replica, {plan.decode_us / 1000:.2f} ms")
    for part, us in sorted(plan.decode_parts.items(), key=lambda item: -item[1]):
        lines.append(f"    {part:16} {us / 1000:8.2f} ms  {model.source_of(part)}")
    return lines
