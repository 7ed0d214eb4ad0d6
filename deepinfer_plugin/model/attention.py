"""Latent sparse attention: window keys of the layer and selected entries of its KV source, in one softmax."""

import torch
from torch import nn

from deepinfer_kernels.attention_output import attention_output
from deepinfer_kernels.hc_norm import SublayerInput
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.kv_store import store_records
from deepinfer_kernels.latent_projections import latent_projections
from deepinfer_kernels.linear import grouped_linear, mxfp8_linear
from deepinfer_kernels.rope import rope
from deepinfer_kernels.sparse_attention import sparse_attention
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.specs import window_spec
from deepinfer_plugin.model.compressor import Compressor
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.hyper_connection import Mix
from deepinfer_plugin.model.indexer import Indexer, Selection
from deepinfer_plugin.model.linear import PreparedLinear, QuantizedWeight, RMSNorm, frozen, place_in_one
from deepinfer_plugin.model.step import Step


class Attention(nn.Module):
    """Attention of one layer. ``kv_source`` is the layer whose entries it reads, itself where it is one.

    Ranks own heads in whole groups, and outputs of wo_b; latents, caches and the selection are the same on every rank.
    """

    def __init__(self, context: BuildContext, layer: int, prefix: str, kv_source: "Attention | None") -> None:
        super().__init__()
        config = context.config
        ranks = self.ranks = context.parallel.tensor
        heads, head_dim, groups = (
            config.num_attention_heads // ranks.size,
            config.head_dim,
            config.o_groups // ranks.size,
        )
        self.num_heads, self.head_dim, self.num_groups = heads, head_dim, groups
        self.ratio = config.compress_ratios[layer]
        self.records, self.arithmetic, self.side = context.records, context.arithmetic, context.side
        self.softmax_scale = head_dim**-0.5
        self.attn_sink = frozen(heads, dtype=torch.float32)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.kv_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.wq_a = QuantizedWeight(config.q_lora_rank, config.hidden_size)
        self.wq_b = PreparedLinear(heads * head_dim, config.q_lora_rank, num_shards=ranks.size)
        self.wkv = QuantizedWeight(head_dim, config.hidden_size)
        place_in_one(self.wq_a, self.wkv)
        self.wo_a = QuantizedWeight(groups * config.o_lora_rank, heads * head_dim // groups)
        self.wo_b = QuantizedWeight(config.hidden_size // ranks.size, config.o_groups * config.o_lora_rank)
        self.window = CacheLayer(
            context.vllm_config,
            f"{prefix}.window",
            window_spec(context.vllm_config, context.records, config.sliding_window, context.window_rule(layer)),
        )
        self.compressor = Compressor(context, layer, f"{prefix}.compressor") if config.is_kv_source(layer) else None
        self.indexer = Indexer(context, layer, f"{prefix}.indexer") if config.is_index_source(layer) else None
        # not registered as children: the caches belong to the source layer
        self._entries: tuple[CacheLayer, CacheLayer] | None = None
        if self.compressor is not None and self.indexer is not None:
            self._entries = (self.compressor.entries, self.indexer.keys)
        elif kv_source is not None:
            self._entries = kv_source._entries

    def forward(
        self,
        given: SublayerInput,
        streams: torch.Tensor,
        mix: Mix,
        step: Step | None,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Selection | None]:
        """Attend, add the result to the streams, and pass the selection on to the layers that share it.

        Args:
            given: one row per token, attn-normed.
            streams: [num_tokens, hc_mult, hidden_size], in front of this sublayer.
            mix: how the result joins them.
            step: the batch; None in a run that only measures memory, where the core is left out.
            selection: of the last index source.

        Returns:
            The streams behind this sublayer, and the selection in force after this layer.
        """
        x = given.x
        query_rows, key_value = self._latents(given)
        if step is None:
            return self._project(self._queries(query_rows, x), streams, mix), selection
        if self.indexer is None or self._entries is None:
            query = self._rotated(query_rows, key_value, x, step)
        else:
            with self.side.fork(x):
                index_query = self.indexer.query(x, query_rows, step)
            if step.writes_entries:
                self.write_entries(x, step)
            self.side.join(x)
            with self.side.fork(x):
                query = self._rotated(query_rows, key_value, x, step)
            selection = self.indexer.select(index_query, self._entries[1], step, selection)
            self.side.join(x)
        rotation = step.rotation(self.ratio)
        window = self.window.metadata(step.attn_metadata)
        has_entries = self._entries is not None and selection is not None
        out = sparse_attention(
            query,
            self.window.kv_cache,
            step.window_slots(window),
            self._entries[0].kv_cache if self._entries is not None else None,
            selection.slots if selection is not None and has_entries else None,
            self.attn_sink,
            self.softmax_scale,
            window_format=self.records.window_format,
            compressed_format=self.records.compressed_format,
            round_p=self.arithmetic.is_exact_bf16,
            cos=rotation.cos,
            sin=rotation.sin,
        )
        return self._project(out, streams, mix), selection

    def _queries(self, query_rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Queries of this rank's heads, not rotated: [num_tokens, num_heads, head_dim]."""
        return self.wq_b(query_rows, x.dtype).view(-1, self.num_heads, self.head_dim)

    def _rotated(self, query_rows: torch.Tensor, key_value: torch.Tensor, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Rotated queries [num_tokens, num_heads, head_dim]; the rows' keys go to the window."""
        rotation = step.rotation(self.ratio)
        query = rope(self._queries(query_rows, x), rotation.cos, rotation.sin)
        store_records(
            self.window.kv_cache,
            step.token_write_slots(self.window.metadata(step.attn_metadata)),
            rope(key_value, rotation.cos, rotation.sin),
            self.records.window_format,
        )
        return query

    def _latents(self, given: SublayerInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent queries for the products that read them, and keys [num_tokens, head_dim]; both normed."""
        return latent_projections(
            given.rows,
            self.wq_a.tensors,
            self.wkv.tensors,
            self.q_norm.weight,
            self.kv_norm.weight,
            self.q_norm.eps,
            out_dtype=given.x.dtype,
            quantize=self.arithmetic.quantize,
        )

    def write_entries(self, x: torch.Tensor, step: Step) -> None:
        """Store the compressed KV and index keys of a KV source; another layer has none.

        Args:
            x: [num_tokens, hidden_size], attn-normed.
            step: the rows.
        """
        if self.compressor is not None and self.indexer is not None:
            self.indexer.store(self.compressor(x, step), step)

    def _project(self, out: torch.Tensor, streams: torch.Tensor, mix: Mix) -> torch.Tensor:
        """out: [num_tokens, num_heads, head_dim] -> new streams."""
        out = out.reshape(out.shape[0], self.num_groups, -1)
        if not self.ranks.is_alone:
            y = self._project_shares(out)
            self.side.join(out)
            return hc_post(y, streams, mix.post, mix.comb)
        self.side.join(out)
        return attention_output(
            out,
            self.wo_a.tensors,
            self.wo_b.tensors,
            streams,
            mix.post,
            mix.comb,
            quantize=self.arithmetic.quantize,
        )

    def _project_shares(self, out: torch.Tensor) -> torch.Tensor:
        """out: [num_tokens, num_groups, head_dim * heads of a group] -> [num_tokens, hidden_size], of all ranks."""
        ranks = self.ranks
        low = grouped_linear(out, *self.wo_a.tensors, out_dtype=out.dtype, num_shards=ranks.size).flatten(1)
        y = mxfp8_linear(
            ranks.gather_columns(low),
            *self.wo_b.tensors,
            out_dtype=out.dtype,
            quantize_input=self.arithmetic.quantize,
            num_shards=ranks.size,
        )
        return ranks.gather_columns(y)
