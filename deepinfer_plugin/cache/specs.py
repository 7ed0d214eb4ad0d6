"""KV-cache specifications of the four kinds of cache, for vLLM's planner and managers."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec, SlidingWindowMLASpec

from deepinfer_plugin.cache.records import KVRecords, pair_state_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_BLOCK_SIZE = 128
"""Tokens in a block of compressed entries and index keys: 128 * 890 bytes at the released size."""

MAX_WINDOW_BLOCK_SIZE = 32
"""Tokens in a block of window records: a 128-token window then wastes at most 31 records at each end."""

STRIDE_ALIGNMENT_BYTES = 32
"""Blocks of all groups share one pool, so its stride must suit the widest vector load of a kernel."""


def block_size(vllm_config: "VllmConfig") -> int:
    """Tokens in a block of the growing caches; even, so that no ratio-2 pair straddles two blocks."""
    cache_config = vllm_config.cache_config
    return int(cache_config.block_size) if cache_config.user_specified_block_size else DEFAULT_BLOCK_SIZE


def window_spec(vllm_config: "VllmConfig", records: KVRecords, sliding_window: int) -> SlidingWindowMLASpec:
    """Window KV of one layer: cached with the prefix, so that a hit reads what a cold run wrote."""
    return SlidingWindowMLASpec(
        block_size=min(block_size(vllm_config), MAX_WINDOW_BLOCK_SIZE),
        num_kv_heads=1,
        head_size=records.window_bytes,
        dtype=torch.uint8,
        max_tp_shards=1,
        dcp_sharded=False,
        sliding_window=sliding_window,
        block_stride_alignment=STRIDE_ALIGNMENT_BYTES,
        bounded_replay=False,
    )


def entry_spec(vllm_config: "VllmConfig", record_bytes: int, ratio: int) -> MLAAttentionSpec:
    """Compressed entries or index keys of one KV source: one record per ``ratio`` tokens."""
    return MLAAttentionSpec(
        block_size=block_size(vllm_config),
        num_kv_heads=1,
        head_size=record_bytes,
        dtype=torch.uint8,
        max_tp_shards=1,
        dcp_sharded=False,
        tokens_per_state=ratio,
        block_stride_alignment=STRIDE_ALIGNMENT_BYTES,
    )


def pair_state_spec(vllm_config: "VllmConfig", records: KVRecords) -> CircularBufferSpec:
    """Ring of the newest fp32 latents and scores of a ratio-2 source, one block per request."""
    speculative = vllm_config.speculative_config
    num_drafts = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
    return CircularBufferSpec(
        block_size=pair_state_rows(num_drafts),
        num_kv_heads=1,
        head_size=2 * records.head_dim,
        head_size_v=0,
        dtype=torch.float32,
        max_tp_shards=1,
        dcp_sharded=False,
        block_stride_alignment=STRIDE_ALIGNMENT_BYTES,
    )
