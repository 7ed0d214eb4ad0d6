"""Lightning indexer: which compressed entries a query attends, chosen once for several layers."""

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices
from deepinfer_kernels.kv_store import store_records
from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant
from deepinfer_kernels.rope import rope
from deepinfer_kernels.swa_indices import entry_slots
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.specs import entry_spec
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.linear import PlainLinear, PreparedLinear, RMSNorm
from deepinfer_plugin.model.step import Step


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries chosen by an index source, for it and the layers after it.

    slots: [num_tokens, index_topk] int64 entry slots in the cache of the KV source, -1: none.
    candidates: [num_tokens, candidate_topk_blocks] int32 ascending block ids, or None before the candidate source.
    """

    slots: torch.Tensor
    candidates: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Rows of an index source, ready to be scored.

    heads: [num_tokens, index_n_heads, index_head_dim], rotated; weights: [num_tokens, index_n_heads], of the heads'
    scores; num_visible: [num_tokens] int64, entries that a row may choose from.
    """

    heads: torch.Tensor
    weights: torch.Tensor
    num_visible: torch.Tensor


class IndexKeys(nn.Module):
    """Index keys of a KV source, made from its unrotated latents."""

    def __init__(self, context: BuildContext, layer: int, prefix: str) -> None:
        super().__init__()
        config, records = context.config, context.records
        self.ratio = config.compress_ratios[layer]
        self.format = records.index_format
        self.wk = PlainLinear(config.index_head_dim, config.head_dim)
        self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps)
        self.keys = CacheLayer(
            context.vllm_config, f"{prefix}.keys", entry_spec(context.vllm_config, records.index_bytes, self.ratio)
        )

    def store(self, latent: torch.Tensor, step: Step) -> None:
        """latent: [num_tokens, head_dim], as the compressor returned it."""
        rotation = step.entry_rotation(self.ratio)
        keys = rope(self.k_norm(self.wk(latent)), rotation.cos, rotation.sin)
        slots = step.entry_write_slots(self.keys.metadata(step.attn_metadata), self.ratio)
        store_records(self.keys.kv_cache, slots, keys, self.format)


class Indexer(IndexKeys):
    """Scores and selects. Owns keys only in a KV source; elsewhere it scores the keys of its KV source."""

    def __init__(self, context: BuildContext, layer: int, prefix: str) -> None:
        config = context.config
        if config.is_kv_source(layer):
            super().__init__(context, layer, prefix)
        else:
            nn.Module.__init__(self)
            self.ratio = config.compress_ratios[layer]
            self.format = context.records.index_format
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.num_candidate_blocks = config.candidate_topk_blocks
        self.candidate_block_size = config.candidate_block_size
        self.publishes_candidates = layer == config.candidate_source_layer_id
        self.arithmetic = context.arithmetic
        self.wq_b = PreparedLinear(self.num_heads * self.head_dim, config.q_lora_rank)
        self.weights_proj = PlainLinear(self.num_heads, config.hidden_size)
        self.weight_scale = self.head_dim**-0.5 * self.num_heads**-0.5

    def query(self, x: torch.Tensor, query_rows: torch.Tensor, step: Step) -> IndexQuery:
        """What the rows look for; it needs no key, so it can be made while those of the step are stored.

        Args:
            x: [num_tokens, hidden_size], attn-normed.
            query_rows: [num_tokens, ...], latent queries as ``latent_projections`` gives them.
            step: the batch.
        """
        rotation = step.rotation(self.ratio)
        query = self.wq_b(query_rows, x.dtype).view(-1, self.num_heads, self.head_dim)
        query = rope(query, rotation.cos, rotation.sin)
        if self.arithmetic.quantize:
            query = mxfp4_fake_quant(query)
        return IndexQuery(query, self.weights_proj(x) * self.weight_scale, step.num_visible(self.ratio))

    def select(self, query: IndexQuery, key_cache: CacheLayer, step: Step, previous: Selection | None) -> Selection:
        """Choose entries for every row.

        Args:
            query: of the rows.
            key_cache: index keys of the KV source, those of this step included.
            step: the batch.
            previous: selection of the index source before this one; carries the candidate blocks.
        """
        scores = self._scores(query, key_cache, step)
        candidates = previous.candidates if previous is not None else None
        if self.publishes_candidates:
            candidates = candidate_blocks(
                scores, query.num_visible, self.num_candidate_blocks, self.candidate_block_size
            )
        elif candidates is not None:
            scores = mask_to_candidates(scores, candidates, self.candidate_block_size)
        metadata = key_cache.metadata(step.attn_metadata)
        slots = entry_slots(
            topk_indices(scores, self.topk, query.num_visible),
            step.req_idx,
            metadata.block_table,
            metadata.block_size // self.ratio,
        )
        return Selection(slots, candidates)

    def _scores(self, query: IndexQuery, key_cache: CacheLayer, step: Step) -> torch.Tensor:
        metadata = key_cache.metadata(step.attn_metadata)
        return indexer_logits(
            query.heads,
            query.weights,
            key_cache.kv_cache,
            metadata.block_table,
            step.req_idx,
            query.num_visible,
            max(step.max_seq_len // self.ratio, 1),
            fmt=self.format,
            entries_per_block=metadata.block_size // self.ratio,
            round_bf16=self.arithmetic.is_exact_bf16,
        )
