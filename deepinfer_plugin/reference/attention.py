"""Latent sparse attention of one layer (spec §2.4 to §2.8): projections, window, compressor, indexer, core, output."""

from __future__ import annotations

import torch

from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices
from deepinfer_kernels.kv_compress import compress_pairs
from deepinfer_kernels.kv_store import gather_records, store_records
from deepinfer_kernels.linear import grouped_linear, linear
from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant
from deepinfer_kernels.rope import YarnScaling, cos_sin, inverse_frequencies, rope
from deepinfer_kernels.sparse_attention import sparse_attention
from deepinfer_kernels.swa_indices import entry_slots, window_slots
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.cache import RequestCache
from deepinfer_plugin.reference.step import Parameters, Rotation, Step


class ReferenceAttention:
    """Attention of one layer; stateless but for the weights, everything of a request is in the cache."""

    def __init__(self, config: ModelConfig, layer: int, parameters: Parameters) -> None:
        self.config = config
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self.parameters = parameters
        self.arithmetic = parameters.arithmetic
        # The nearest sources at or before this layer; -1 for a layer that attends its window only.
        has_entries = self.ratio > 0
        self.kv_source = max(i for i in config.kv_source_layer_ids if i <= layer) if has_entries else -1
        self.index_source = max(i for i in config.index_source_layer_ids if i <= layer) if has_entries else -1
        # The layer decides the table, for its window keys too (spec §2.3).
        theta = config.compress_rope_theta if has_entries else config.rope_theta
        frequencies = inverse_frequencies(config.qk_rope_head_dim, theta, self._yarn() if has_entries else None)
        self.frequencies = frequencies.to(parameters["attn_sink"].device)

    def _yarn(self) -> YarnScaling:
        scaling = self.config.rope_scaling
        return YarnScaling(
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )

    def __call__(self, x: torch.Tensor, step: Step, cache: RequestCache) -> torch.Tensor:
        """Attend with the normed rows x [num_tokens, hidden_size]; writes the caches, returns a tensor like x."""
        rotation = self.rotation(step.positions)
        query_latent = self.parameters.norm("q_norm", self.parameters.quantized_linear("wq_a", x))
        query = self.parameters.quantized_linear("wq_b", query_latent)
        query = query.view(x.shape[0], self.config.num_attention_heads, self.config.head_dim)
        query = rope(query, *rotation)
        step.record(f"L{self.layer}.qr", query_latent)
        step.record(f"L{self.layer}.q", query)

        self.write_window(x, rotation, step, cache)
        if self.layer == self.kv_source:
            self.write_entries(x, step, cache)
        if self.layer == self.index_source:
            step.selections[self.layer] = self.select(x, query_latent, rotation, step, cache)
        return self.project(self.attend(query, rotation, step, cache))

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """The rotation tables of this layer at ``positions``."""
        return cos_sin(positions, self.frequencies)

    def write_window(self, x: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache) -> None:
        """Store this layer's own key-value rows, one per token."""
        kv = rope(self.parameters.norm("kv_norm", self.parameters.quantized_linear("wkv", x)), *rotation)
        store_records(cache.window[self.layer], step.positions, kv, self.arithmetic.window_format)
        if step.trace is not None:
            step.record(f"L{self.layer}.window_kv_read", self.read(cache.window[self.layer], step.positions))

    def read(self, page: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Values of the window records at ``slots``, [..., head_dim]."""
        arithmetic = self.arithmetic
        return gather_records(page, slots, self.config.head_dim, arithmetic.window_format, arithmetic.activation_dtype)

    def pool(self, x: torch.Tensor, step: Step, cache: RequestCache) -> torch.Tensor:
        """The latent of the group that each token closes, [num_tokens, head_dim], before the norm (spec §2.6)."""
        dtype = self.arithmetic.activation_dtype
        if self.ratio == 1:
            return linear(x, self.parameters["compressor.wkv.weight"], out_dtype=dtype)
        latent = linear(x, self.parameters["compressor.wkv.weight"], out_dtype=torch.float32)
        score = linear(x, self.parameters["compressor.wgate.weight"], out_dtype=torch.float32)
        return compress_pairs(
            latent,
            score,
            step.positions,
            step.req_idx,
            cache.pair_state[self.layer],
            cache.state_block,
            out_dtype=dtype,
        )

    def entry_positions(self, entries: torch.Tensor) -> torch.Tensor:
        """The position at which entry g is rotated: its group's first token."""
        return entries * self.ratio

    def write_entries(self, x: torch.Tensor, step: Step, cache: RequestCache) -> None:
        """Store the compressed KV and the index key of every group that a token of this call closes."""
        entries = step.positions // self.ratio
        closes = step.positions % self.ratio == self.ratio - 1
        slots = torch.where(closes & (step.positions >= step.entries_from), entries, -1)
        rotation = self.rotation(self.entry_positions(entries))
        latent = self.parameters.norm("compressor.norm", self.pool(x, step, cache))
        # The index key comes from the latent before its rotation.
        key = linear(latent, self.parameters["indexer.wk.weight"], out_dtype=self.arithmetic.activation_dtype)
        key = rope(self.parameters.norm("indexer.k_norm", key), *rotation)
        store_records(cache.index_keys[self.layer], slots, key, self.arithmetic.index_format)
        compressed = rope(latent, *rotation)
        store_records(cache.compressed[self.layer], slots, compressed, self.arithmetic.compressed_format)
        step.record(f"L{self.layer}.latent", latent[closes])

    def num_visible(self, positions: torch.Tensor) -> torch.Tensor:
        """How many entries a query may see, int64 [num_tokens]: the groups whose last token is not after it."""
        return (positions + 1) // self.ratio

    def index_scores(
        self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache
    ) -> torch.Tensor:
        """Scores of every entry, fp32 [num_tokens, entries], -inf where not visible (spec §2.7).

        The keys are those of the layer's own KV source, also while a pair is open: the repair of the defect in
        REF's one-token decode.
        """
        config, dtype = self.config, self.arithmetic.activation_dtype
        query = self.parameters.quantized_linear("indexer.wq_b", query_latent)
        query = rope(query.view(x.shape[0], config.index_n_heads, config.index_head_dim), *rotation)
        if self.arithmetic.quantize:
            query = mxfp4_fake_quant(query)
        weights = linear(x, self.parameters["indexer.weights_proj.weight"], out_dtype=dtype)
        # Two roundings in bf16: the projection, then its product with the constant.
        weights = (weights.float() * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)).to(dtype)
        keys = cache.index_keys[self.kv_source]
        return indexer_logits(
            query,
            weights,
            keys,
            cache.block_table,
            step.req_idx,
            self.num_visible(step.positions),
            keys.shape[1],
            fmt=self.arithmetic.index_format,
            entries_per_block=keys.shape[1],
            round_bf16=self.arithmetic.is_exact_bf16,
        )

    def select(
        self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache
    ) -> torch.Tensor:
        """Entries each query attends to, int32 [num_tokens, index_topk] ascending, -1 at the end.

        The candidate source publishes its blocks in ``step``; later sources choose inside them.
        """
        config = self.config
        scores = self.index_scores(x, query_latent, rotation, step, cache)
        if self.layer == config.candidate_source_layer_id:
            step.candidate_blocks = candidate_blocks(
                scores, self.num_visible(step.positions), config.candidate_topk_blocks, config.candidate_block_size
            )
        elif step.candidate_blocks is not None:
            scores = mask_to_candidates(scores, step.candidate_blocks, config.candidate_block_size)
        step.record(f"L{self.layer}.index_scores", scores)
        return topk_indices(scores, config.index_topk)

    def attend(self, query: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache) -> torch.Tensor:
        """One softmax over the window and the selected entries; rotated back, [num_tokens, heads, head_dim]."""
        config = self.config
        is_decoder = self.layer >= config.kv_source_layer_ids[-1]
        floor = torch.full_like(step.positions, cache.decoder_floor if is_decoder else step.encoder_floor)
        window = window_slots(
            step.positions, step.req_idx, cache.block_table, cache.capacity, config.sliding_window, floor
        )
        compressed_cache = compressed_slots = None
        if self.ratio > 0:
            selection = step.selections[self.index_source]
            step.record(f"L{self.layer}.comp_idx", selection)
            compressed_cache = cache.compressed[self.kv_source]
            compressed_slots = entry_slots(selection, step.req_idx, cache.block_table, compressed_cache.shape[1])
        return sparse_attention(
            query,
            cache.window[self.layer],
            window,
            compressed_cache,
            compressed_slots,
            self.parameters["attn_sink"],
            config.head_dim**-0.5,
            window_format=self.arithmetic.window_format,
            compressed_format=self.arithmetic.compressed_format,
            round_p=self.arithmetic.is_exact_bf16,
            cos=rotation[0],
            sin=rotation[1],
        )

    def project(self, heads: torch.Tensor) -> torch.Tensor:
        """Grouped output projection: [num_tokens, heads, head_dim] to [num_tokens, hidden_size]."""
        config = self.config
        group_width = config.num_attention_heads // config.o_groups * config.head_dim
        groups = heads.reshape(heads.shape[0], config.o_groups, group_width)
        ranks = grouped_linear(
            groups,
            self.parameters["wo_a.weight"],
            self.parameters["wo_a.scale"],
            out_dtype=self.arithmetic.activation_dtype,
        )
        return self.parameters.quantized_linear("wo_b", ranks.flatten(1))
