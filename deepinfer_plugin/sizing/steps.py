"""Expected time of a step, operation by operation, from the measured figures; the rest is a roofline, and says so.

A time is ``measured`` only on the measured card, on one rank and for an operation with a figure. Everything else is an
``estimate``: another card by its rates, several ranks by the bytes that each of them reads, exchanges by their link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.sizing import figures
from deepinfer_plugin.sizing.devices import Gpu
from deepinfer_plugin.sizing.figures import Curve

REFERENCE_WIDTH = 5120  # of the layers whose chains were timed
MXFP4_BYTES = 0.5 + 1.0 / 32.0  # per value, with its share of the scale
EXCHANGE_LATENCY_US, EXCHANGE_SHARE = 20.0, 0.7  # of a collective; of the link's rate
CHAIN_LATENCY_US = 15.0  # of a chain of launches, which no cut shortens
DECODE_IMBALANCE, PREFILL_IMBALANCE = 1.090, 1.060
"""Slowest rank over the mean at the experts: the vendor's production, see published.py."""
COPY_BOUND_ROWS = 64  # up to here a product is bound by its weights, from 4096 rows on by the tensor cores

PRODUCTS, ATTENTION, INDEX, EXPERTS, STREAMS, ENGRAM, HEAD, DRAFTS, EXCHANGE, ENGINE = (
    "dense products",
    "attention",
    "index",
    "experts",
    "stream mixing",
    "engram",
    "head and draw",
    "draft blocks",
    "exchange",
    "engine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How ranks share the model: ``tensor`` ranks a replica, and whether replicas share the experts.

    Ranks of one replica cut every expert by outputs; where replicas share them, whole experts are dealt out.
    """

    tensor: int
    replicas: int
    shares_experts: bool

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.replicas

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the routed experts, whole ones or their outputs."""
        return self.tensor * (self.replicas if self.shares_experts else 1)

    @property
    def dealt_ranks(self) -> int:
        """Ranks that whole routed experts are dealt out to."""
        return self.expert_ranks if self.shares_experts else 1

    @property
    def rows_factor(self) -> int:
        """Replicas whose rows meet at the experts."""
        return self.replicas if self.shares_experts else 1


@dataclass(slots=True)
class Parts:
    """Microseconds of a step by operation."""

    us: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, us: float) -> None:
        self.us[part] = self.us.get(part, 0.0) + us

    @property
    def total_us(self) -> float:
        return sum(self.us.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Times of one configuration on one kind of GPU in one layout."""

    config: ModelConfig
    gpu: Gpu
    layout: Layout
    keep_tokens: int | None = 140  # rows of a prompt that pass the decoder layers; None: all
    num_drafts: int = 0

    def decode(self, requests: float, context: float) -> Parts:
        """One step in which every request of a replica gets a token, or verifies its drafts."""
        parts = Parts()
        rows = requests * (1 + self.num_drafts)
        self._layers(parts, range(self.config.num_hidden_layers), rows, context, is_decode=True)
        self._head(parts, rows)
        if self.num_drafts:
            self._draft_pass(parts, requests, context)
        device_us = parts.total_us
        host_us = requests * figures.HOST_US_PER_TOKEN
        parts.add(ENGINE, max(figures.STEP_US, host_us - device_us))
        return parts

    def prefill(self, prompt: int, step_tokens: int, num_prompts: int = 1) -> Parts:
        """All steps of prompts of one length: short ones share steps, a long one is cut into chunks."""
        parts = Parts()
        encoder = self.config.kv_source_layer_ids[-1]
        layers = range(self.config.num_hidden_layers)
        together = max(min(step_tokens // prompt, num_prompts), 1)
        num_groups = -(-num_prompts // together)
        for start in range(0, prompt, step_tokens):
            length = min(step_tokens, prompt - start)
            one = Parts()
            rows, context = length * together, start + length / 2
            kept = rows if self.keep_tokens is None else self._kept(prompt, start, length) * together
            self._layers(one, layers[:encoder], rows, context, is_decode=False)
            self._write_entries(one, rows)
            if kept:
                self._layers(one, layers[encoder:], kept, start + length, is_decode=False)
            one.add(ENGINE, figures.STEP_US)
            for name, us in one.us.items():
                parts.add(name, us * num_groups)
        self._head(parts, num_prompts)
        return parts

    def layer_without_attention_us(self, rows: float) -> float:
        """A decoder layer that selects nothing, as it was timed: products, mixing and experts."""
        parts = Parts()
        layer = self.config.num_hidden_layers - 1
        self._layers(parts, (layer,), rows, self.config.sliding_window, is_decode=True)
        return sum(us for part, us in parts.us.items() if part in (PRODUCTS, STREAMS, EXPERTS))

    def source_of(self, part: str) -> str:
        """``measured`` or ``estimate``, as for every model of another width.

        What every rank computes whole lasts as long as on one.
        """
        whole, cut = (INDEX, STREAMS, ENGINE), (PRODUCTS, ATTENTION, EXPERTS, HEAD)
        is_timed = part in whole or (part in cut and self.layout.expert_ranks == 1)
        is_timed = is_timed and self.config.hidden_size == REFERENCE_WIDTH
        return "measured" if is_timed and self.gpu.is_measured else "estimate"

    def _kept(self, prompt: int, start: int, length: int) -> int:
        """Rows of a chunk that pass the decoder layers: those among the last ``keep_tokens`` of the prompt."""
        assert self.keep_tokens is not None
        return max(start + length - max(prompt - self.keep_tokens, start), 0)

    def _layers(self, parts: Parts, layers: Iterable[int], rows: float, context: float, *, is_decode: bool) -> None:
        config, tensor = self.config, self.layout.tensor
        for layer in layers:
            ratio = config.ratio(layer)
            records = min(config.sliding_window, context)
            records += min(config.index_topk, context / ratio) if ratio else 0
            parts.add(PRODUCTS, self._chains(rows))
            parts.add(STREAMS, self._streams(rows, has_side_stream=is_decode))
            parts.add(ATTENTION, self._attention(rows, records))
            if config.is_index_source(layer):
                entries = context / max(ratio, 1)
                if config.is_candidate_consumer(layer):
                    entries = min(entries, config.candidate_topk_blocks * config.candidate_block_size)
                parts.add(INDEX, self._index(rows, entries))
            if config.engram_index(layer) is not None:
                parts.add(ENGRAM, self._engram(rows))
            count, top = config.n_routed_experts, config.num_experts_per_tok
            parts.add(EXPERTS, self._experts(rows, count, top, is_decode=is_decode))
            if self.layout.expert_ranks > 1:
                parts.add(EXCHANGE, self._exchange(rows, tensor))

    # One operation each, in microseconds of this card and layout.

    @property
    def _copy_scale(self) -> float:
        return figures.COPY_TB_S / self.gpu.copy_tb_s

    def _scaled(self, curve: Curve, rows: float) -> float:
        """A measured time, by copy rate while few rows read weights and by matmul rate for many."""
        matmul_scale = figures.MATMUL_TFLOPS / self.gpu.matmul_tflops
        share = Curve(points=((COPY_BOUND_ROWS, 1.0), (4096, 2.0)), source="").at(rows) - 1.0
        return curve.time_at(rows) * (self._copy_scale * (1.0 - share) + matmul_scale * share)

    def _chains(self, rows: float) -> float:
        """The three chains of products of a layer; a rank reads weights that are not cut, and its part of the rest."""
        config = self.config
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        low_rank = config.o_groups * config.o_lora_rank
        chains = (
            (figures.QUERIES_KEYS_US, width * (config.q_lora_rank + config.head_dim), config.q_lora_rank * heads),
            (figures.SHARED_EXPERT_US, 2 * width * config.moe_intermediate_size, width * config.moe_intermediate_size),
            (figures.OUTPUT_US, 0, low_rank * (heads // config.o_groups + width)),
        )
        total = 0.0
        for curve, whole, cut in chains:
            us = self._scaled(curve, rows)
            latency = min(CHAIN_LATENCY_US, us)
            total += latency + (us - latency) * (whole + cut / self.layout.tensor) / (whole + cut)
        return total

    def _streams(self, rows: float, *, has_side_stream: bool) -> float:
        """Mix coefficients of both halves of a layer; a decode step of few rows hides what runs on a second stream."""
        us = 2 * (self._scaled(figures.HC_MIX_US, rows) + self._scaled(figures.HC_SINKHORN_US, rows))
        if has_side_stream and rows <= figures.SIDE_STREAM_ROWS:
            us -= figures.SIDE_STREAM_US * self._copy_scale
        return max(us, 0.0)

    def _attention(self, rows: float, records: float) -> float:
        """Not shortened by more ranks: each of them reads every record, and tiles hold 64 heads."""
        is_sm90 = self.gpu.device_class == "SM90"
        curve = figures.ATTENTION_SM90_US if is_sm90 else figures.ATTENTION_US
        return self._scaled(curve, rows) * records / figures.ATTENTION_RECORDS

    def _index(self, rows: float, entries: float) -> float:
        """Scores and selection, with the projections of queries; every rank computes all of it."""
        count = rows * entries
        score = max(figures.INDEX_SCORE_LEAST_US, count * figures.INDEX_SCORE_PS.at(rows) * 1e-6)
        select = figures.INDEX_SELECT_LEAST_US + count * figures.INDEX_SELECT_PS * 1e-6
        config = self.config
        query = self._product(rows, config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        return (score + select) * self._copy_scale + query

    def _product(self, rows: float, width_in: int, width_out: int) -> float:
        """A product that was not timed: its weights at the rate of a small one, or its operations."""
        copy_us = width_in * width_out / (figures.NARROW_PRODUCT_COPY * self.gpu.copy_tb_s * 1e6)
        return max(copy_us, self._matmul_us(2.0 * rows * width_in * width_out, figures.WIDE_PRODUCT_MATMUL))

    def _matmul_us(self, operations: float, share: float) -> float:
        return operations / (share * self.gpu.matmul_tflops * 1e6)

    def _write_entries(self, parts: Parts, rows: float) -> None:
        """Compressed KV and index keys of the decoder's source, which every row of a prompt writes."""
        config = self.config
        us = self._product(rows, config.hidden_size, 2 * config.head_dim)
        parts.add(INDEX, us + self._product(rows, config.head_dim, config.index_head_dim))

    def _experts(self, rows: float, num_experts: int, top_k: int, *, is_decode: bool) -> float:
        """Routed experts of the slowest rank: bound by the weights of those that are hit, or by their operations."""
        config, ranks = self.config, self.layout.expert_ranks
        tokens = rows * self.layout.rows_factor
        here = num_experts / ranks
        values = 3 * config.hidden_size * config.moe_intermediate_size
        hit = here * (1.0 - math.pow(1.0 - top_k / num_experts, tokens))
        curve = figures.EXPERTS_COPY_384 if here > 110 else figures.EXPERTS_COPY_32
        copy_us = hit * values * MXFP4_BYTES / (curve.at(tokens) * self.gpu.copy_tb_s * 1e6)
        per_expert = tokens * top_k / num_experts
        share = figures.EXPERTS_MATMUL.at(per_expert)
        operations = 2.0 * tokens * top_k / ranks * values
        imbalance = DECODE_IMBALANCE if is_decode else PREFILL_IMBALANCE
        imbalance = imbalance if self.layout.dealt_ranks > 1 else 1.0  # ranks that cut every expert do the same
        return imbalance * max(copy_us, self._matmul_us(operations, share))

    def _engram(self, rows: float) -> float:
        config, tensor = self.config, self.layout.tensor
        row_bytes = config.engram_head_dim + config.engram_head_dim // 32
        lookup = rows * config.num_engram_columns / tensor * row_bytes
        streams = 3.0 * rows * config.hc_mult * config.hidden_size * 2
        copy_us = lookup / figures.ENGRAM_LOOKUP_COPY + streams / figures.ENGRAM_GATE_COPY
        width_in = config.num_engram_columns * config.engram_head_dim
        width_out = (config.hc_mult + 1) * config.hidden_size // tensor
        return copy_us / (self.gpu.copy_tb_s * 1e6) + self._product(rows, width_in, width_out)

    def _head(self, parts: Parts, rows: float) -> None:
        config = self.config
        vocabulary = config.vocab_size / self.layout.tensor
        values = vocabulary * config.hidden_size
        copy_us = 2.0 * values / (figures.HEAD_COPY.at(rows) * self.gpu.copy_tb_s * 1e6)
        us = max(copy_us, self._matmul_us(2.0 * rows * values, figures.HEAD_MATMUL))
        parts.add(HEAD, us + figures.DRAW_US.time_at(rows) * self._copy_scale)

    def _exchange(self, rows: float, tensor: int) -> float:
        """What reaches a rank in a layer: columns of three products, rows of other replicas, slots of other ranks.

        Ranks that cut every expert get the columns between its two products instead of slots.
        """
        config, layout = self.config, self.layout
        row_bytes = 2.0 * config.hidden_size
        columns = 2.0 * (config.o_groups * config.o_lora_rank) + 2 * row_bytes if tensor > 1 else 0.0
        send = (layout.rows_factor - 1) * row_bytes
        slot_bytes = layout.expert_ranks * row_bytes / tensor
        if layout.dealt_ranks == 1:
            slot_bytes = 2.0 * config.moe_intermediate_size
        slots = config.num_experts_per_tok * slot_bytes
        calls = 3 * (tensor > 1) + (layout.rows_factor > 1) + 1
        rate = EXCHANGE_SHARE * self.gpu.link_gb_s * 1e3  # bytes a microsecond
        return calls * EXCHANGE_LATENCY_US + rows * (columns + send + slots) / rate

    def _draft_pass(self, parts: Parts, requests: float, context: float) -> None:
        """The draft blocks over a block of rows a request: windows only, experts of their own, their head."""
        config = self.config
        rows = requests * config.dspark_block_size
        records = min(config.sliding_window, context)
        us = self._product(rows, len(config.dspark_target_layer_ids) * config.hidden_size, config.hidden_size)
        for _ in range(config.num_nextn_predict_layers):
            us += self._chains(rows) + self._attention(rows, records)
            us += self._streams(rows, has_side_stream=False)
            us += self._experts(rows, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok, is_decode=True)
            us += self._exchange(rows, self.layout.tensor) if self.layout.expert_ranks > 1 else 0.0
        head = Parts()
        self._head(head, rows)
        parts.add(DRAFTS, us + head.total_us)
