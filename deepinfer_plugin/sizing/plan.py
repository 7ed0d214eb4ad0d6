"""Layouts of a number of GPUs, what fits into each, and how much of a load each carries.

An engine of vLLM prefills and decodes in one process, and its steps share the time: prompts take a part of it, the
rest decodes. That is the whole model of a replica:

    prefill share  u = sum over loads of (rate / replicas * time of the prompt's steps)
    requests       n = answer tokens a second * time of a decode step of n requests / (1 - u)

The smallest n is taken; the load is carried if n fits into the KV pool and into the largest batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from deepinfer_plugin.errors import ConfigError, SettingError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import TENSOR_SIZES, check_sizes
from deepinfer_plugin.replay.settings import ReplaySettings, TruncationMode
from deepinfer_plugin.sizing.devices import Gpu
from deepinfer_plugin.sizing.loads import Load, Mix
from deepinfer_plugin.sizing.memory import KVPool, rank_weights
from deepinfer_plugin.sizing.steps import Layout, StepModel

GIB = 1 << 30
RUNTIME_BYTES = 2 * GIB
"""CUDA context, communicators, captured graphs and PyTorch's own cache of a rank: an estimate."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of requests that an engine is asked to decode together: vLLM captures graphs up to 512."""
FACTOR_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line decides beside GPUs and loads.

    Attributes:
        step_tokens: ``--max-num-batched-tokens``.
        utilization: ``--gpu-memory-utilization``.
        num_drafts: drafts of a step; 0: none.
        acceptance: share of them that is accepted.
        replay: how many rows of a prompt the decoder layers compute.
        has_images: whether the image tower is loaded.
    """

    step_tokens: int = 8192
    utilization: float = 0.92
    num_drafts: int = 0
    acceptance: float = 0.75
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    has_images: bool = True

    def __post_init__(self) -> None:
        self._require("--step-tokens", self.step_tokens, 128 <= self.step_tokens <= 1 << 20, "128 to 1048576")
        self._require("--utilization", self.utilization, 0.1 <= self.utilization <= 1.0, "0.1 to 1")
        self._require("--drafts", self.num_drafts, 0 <= self.num_drafts <= 5, "0 to 5")
        self._require("--acceptance", self.acceptance, 0.0 <= self.acceptance <= 1.0, "0 to 1")

    @staticmethod
    def _require(option: str, value: float, is_right: bool, rule: str) -> None:
        if not is_right:
            raise SettingError(f"sizing: {option} is {value:g}, expected {rule}")

    @property
    def keep_tokens(self) -> int | None:
        """Rows of a prompt that pass the decoder layers; None: all."""
        return self.replay.keep_tokens if self.replay.mode is TruncationMode.COMPACT else None

    @property
    def tokens_per_step(self) -> float:
        """Of a decoding request."""
        return 1.0 + self.num_drafts * self.acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU; the parts add up to ``total``."""

    total: int
    unused: int  # what gpu_memory_utilization leaves
    weights: Mapping[str, int]
    runtime: int
    activations: int
    kv: int  # negative: it does not fit

    @classmethod
    def of(cls, config: ModelConfig, gpu: Gpu, layout: Layout, options: Options, longest: int) -> Memory:
        """What is left for the KV cache of requests of up to ``longest`` tokens."""
        total = int(gpu.memory_gib * GIB)
        weights = rank_weights(
            config,
            layout.tensor,
            layout.dealt_ranks,
            has_drafts=options.num_drafts > 0,
            has_images=options.has_images,
        )
        unused = total - int(total * options.utilization)
        activations = _activation_bytes(config, layout, options, longest)
        kv = total - unused - sum(weights.values()) - RUNTIME_BYTES - activations
        return cls(total=total, unused=unused, weights=weights, runtime=RUNTIME_BYTES, activations=activations, kv=kv)


def _activation_bytes(config: ModelConfig, layout: Layout, options: Options, longest: int) -> int:
    """Tensors of a prefill step that live at the same time: an estimate.

    Three copies of the streams, queries and attention results of this rank's heads, the slots of the experts, and the
    fp32 scores of the widest selection.
    """
    rows = options.step_tokens
    at_experts = rows * layout.rows_factor
    streams = 3 * rows * config.hc_mult * config.hidden_size * 2
    heads = 2 * rows * config.num_attention_heads * config.head_dim * 2 // layout.tensor
    inner, outputs, tensor = config.moe_intermediate_size, config.hidden_size, layout.tensor
    slots = at_experts * config.num_experts_per_tok * (inner + outputs) * 2
    if layout.dealt_ranks > 1:  # results of every rank, before the right one is chosen
        slots += layout.expert_ranks // tensor * rows * config.num_experts_per_tok * outputs * 2
    elif tensor > 1:  # columns between the products: this rank's, those of all as they came, and side by side
        slots = rows * config.num_experts_per_tok * max(inner // tensor + 2 * inner, inner + outputs // tensor) * 2
    narrow = min(rows, options.keep_tokens or rows)
    ratios = {config.ratio(layer): rows for layer in config.index_source_layer_ids if config.ratio(layer) > 1}
    scores = max([rows * longest // ratio for ratio in ratios] + [narrow * longest]) * 4
    return int(streams + heads + slots + scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One layout under the load.

    Attributes:
        layout: of the GPUs.
        memory: of one GPU.
        kv_tokens: tokens of one long request that a replica could hold, over all replicas.
        most_requests: decoding requests of the load's lengths that a replica can hold.
        requests: those that decode at a time in a replica under the load; None: not carried.
        decode_us: time of their step.
        prefill_share: part of the time that prompts take.
        factor: how many times this load is carried at most; below 1: not carried.
        refusal: why the layout cannot serve at all; None: it can.
    """

    layout: Layout
    memory: Memory | None = None
    kv_tokens: int = 0
    most_requests: int = 0
    requests: float | None = None
    decode_us: float = 0.0
    prefill_share: float = 0.0
    factor: float = 0.0
    decode_parts: Mapping[str, float] = field(default_factory=dict)
    first_token_us: Mapping[str, float] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def batch(self) -> int:
        """``--max-num-seqs``: room for three standard deviations of requests that come at random."""
        needed = self.most_requests if self.requests is None else self.requests + 3.0 * math.sqrt(self.requests)
        return next((size for size in BATCHES if size >= needed), BATCHES[-1])


def layouts(num_gpus: int) -> list[Layout]:
    """Every layout that uses all GPUs with equal replicas."""
    found = []
    for tensor in TENSOR_SIZES:
        if num_gpus % tensor == 0:
            replicas = num_gpus // tensor
            found += [
                Layout(tensor=tensor, replicas=replicas, shares_experts=shares)
                for shares in ((False, True) if replicas > 1 else (False,))
            ]
    return found


def plan_all(config: ModelConfig, gpu: Gpu, num_gpus: int, mix: Mix, options: Options) -> list[Plan]:
    """Every layout, the one that carries most of the load first, refused ones last."""
    mix.check(config.max_position_embeddings)
    plans = [plan(config, gpu, layout, mix, options) for layout in layouts(num_gpus)]
    return sorted(plans, key=lambda one: (one.refusal is not None, -one.factor, one.layout.tensor))


def plan(config: ModelConfig, gpu: Gpu, layout: Layout, mix: Mix, options: Options) -> Plan:
    """One layout."""
    try:
        check_sizes(config, layout.tensor, layout.dealt_ranks, has_drafts=options.num_drafts > 0)
    except ConfigError as error:
        return Plan(layout=layout, refusal=str(error).partition(": ")[2].partition("; ")[0])
    if options.num_drafts and layout.rows_factor > 1:
        return Plan(layout=layout, refusal="drafts with experts shared by replicas are not built")
    memory = Memory.of(config, gpu, layout, options, mix.longest)
    pool = KVPool.of(config, options.num_drafts, options.replay)
    longest_step = min(options.step_tokens, mix.longest)
    free_blocks = memory.kv // pool.block_bytes - pool.step_blocks(longest_step)
    if free_blocks < pool.blocks(mix.longest):
        needed = (pool.step_blocks(longest_step) + pool.blocks(mix.longest)) * pool.block_bytes
        short = (needed - memory.kv) / GIB
        return Plan(layout=layout, memory=memory, refusal=f"{short:.1f} GiB too little for one request of the load")
    blocks = sum(mix.share(load) * pool.blocks(load.length) for load in mix.loads)
    replica = Replica(
        model=StepModel(
            config=config, gpu=gpu, layout=layout, keep_tokens=options.keep_tokens, num_drafts=options.num_drafts
        ),
        mix=mix,
        options=options,
        most_requests=min(int(free_blocks / blocks), BATCHES[-1]),
    )
    steady = replica.steady(1.0)
    requests, prefill_share = steady if steady is not None else (None, replica.prefill_share(1.0))
    shown = requests if requests is not None else float(replica.most_requests)
    parts = replica.model.decode(shown, mix.mean_context)
    return Plan(
        layout=layout,
        memory=memory,
        kv_tokens=(free_blocks - pool.fixed_blocks) * 128 * layout.replicas,
        most_requests=replica.most_requests,
        requests=requests,
        decode_us=parts.total_us,
        prefill_share=prefill_share,
        factor=replica.largest_factor(),
        decode_parts=parts.us,
        first_token_us={f"{load.prompt}:{load.answer}": replica.prompt_us(load) for load in mix.loads},
    )


@lru_cache(maxsize=256)
def _prompt_us(model: StepModel, prompt: int, step_tokens: int) -> float:
    """Asked for with every multiple of the load that is tried; a long prompt has thousands of steps."""
    return model.prefill(prompt, step_tokens).total_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine under its part of the load."""

    model: StepModel
    mix: Mix
    options: Options
    most_requests: int

    def prompt_us(self, load: Load) -> float:
        """The steps of one prompt, alone."""
        return _prompt_us(self.model, load.prompt, self.options.step_tokens)

    def prefill_share(self, factor: float) -> float:
        """Part of the time that prompts of the load times ``factor`` take."""
        replicas = self.model.layout.replicas
        return factor * sum(load.rate * self.prompt_us(load) for load in self.mix.loads) * 1e-6 / replicas

    def steady(self, factor: float) -> tuple[float, float] | None:
        """Requests that decode at a time and the prefill share; None where the load times ``factor`` is not carried."""
        share = self.prefill_share(factor)
        if share >= 1.0:
            return None
        tokens = factor * self.mix.answer_rate / self.model.layout.replicas / self.options.tokens_per_step

        def needed(requests: float) -> float:
            return tokens * self.model.decode(requests, self.mix.mean_context).total_us * 1e-6 / (1.0 - share)

        low, high = 0.0, float(self.most_requests)
        if high < 1 or needed(high) > high:
            return None
        if needed(1.0) <= 1.0:
            return needed(1.0), share
        low = 1.0
        for _ in range(FACTOR_STEPS):  # needed(low) > low, needed(high) <= high
            middle = (low + high) / 2
            low, high = (low, middle) if needed(middle) <= middle else (middle, high)
        return high, share

    def largest_factor(self) -> float:
        """The largest multiple of the load that is carried, to a part in a thousand."""
        low, high = 0.0, 1.0
        while self.steady(high) is not None:
            low, high = high, high * 2
        while high - low > 1e-3 * high and high > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if self.steady(middle) is None else (middle, high)
        return low
