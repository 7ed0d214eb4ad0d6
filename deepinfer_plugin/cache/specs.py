"""KV-cache specifications of the kinds of cache, for vLLM's planner and managers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec, SlidingWindowMLASpec

from deepinfer_plugin.cache import quiet_steps
from deepinfer_plugin.cache.records import KVRecords, pair_state_rows
from deepinfer_plugin.replay import hits
from deepinfer_plugin.replay.window import ReplayRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_BLOCK_SIZE = 128
"""Tokens in a block of compressed entries and index keys: 128 * 890 bytes at the released size."""

MAX_WINDOW_BLOCK_SIZE = 32
"""Tokens in a block of window records: a 128-token window then wastes at most 31 records at each end."""

STRIDE_ALIGNMENT_BYTES = 32
"""Blocks of all groups share one pool, so its stride must suit the widest vector load of a kernel."""


# Wherever this specification is known, in the engine's process too, prefix hits keep to its rule.
hits.install()
quiet_steps.install()


@dataclass(frozen=True, kw_only=True)
class ReplayedWindowSpec(SlidingWindowMLASpec):
    """Window KV that is computed again after a prefix hit, and therefore neither looked up nor kept with the prefix.

    vLLM's managers treat it as a window: pages behind it are freed, pages of a hit are allocated afresh. Unlike vLLM's
    own bounded replay it does not make the scheduler go back: the rule that it carries limits hits (replay/hits.py),
    and the worker computes what the rule asks for.
    """

    rule: ReplayRule

    @property
    def prefix_replay_tokens(self) -> int:
        return 0

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The common specification of a group, whose layers have equal ones."""
        assert all(spec == specs[0] for spec in specs), "ReplayedWindowSpec: specs of one group differ"
        return specs[0]


def block_size(vllm_config: "VllmConfig") -> int:
    """Tokens in a block of the growing caches; even, so that no ratio-2 pair straddles two blocks."""
    cache_config = vllm_config.cache_config
    return int(cache_config.block_size) if cache_config.user_specified_block_size else DEFAULT_BLOCK_SIZE


def num_drafts(vllm_config: "VllmConfig") -> int:
    """Tokens drafted in a step."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def window_spec(
    vllm_config: "VllmConfig", records: KVRecords, sliding_window: int, rule: ReplayRule | None
) -> SlidingWindowMLASpec:
    """Window KV of one layer.

    Args:
        vllm_config: of the engine.
        records: of the model.
        sliding_window: tokens of the window.
        rule: None caches the window with the prefix, so that a hit reads what a cold run wrote; a rule says how it is
            computed again.
    """
    values = {
        "block_size": min(block_size(vllm_config), MAX_WINDOW_BLOCK_SIZE),
        "num_kv_heads": 1,
        "head_size": records.window_bytes,
        "dtype": torch.uint8,
        "max_tp_shards": 1,
        "dcp_sharded": False,
        "sliding_window": sliding_window,
        "block_stride_alignment": STRIDE_ALIGNMENT_BYTES,
    }
    if rule is None:
        return SlidingWindowMLASpec(**values, bounded_replay=False)
    return ReplayedWindowSpec(**values, bounded_replay=True, rule=rule)


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
    return CircularBufferSpec(
        block_size=pair_state_rows(num_drafts(vllm_config)),
        num_kv_heads=1,
        head_size=2 * records.head_dim,
        head_size_v=0,
        dtype=torch.float32,
        max_tp_shards=1,
        dcp_sharded=False,
        block_stride_alignment=STRIDE_ALIGNMENT_BYTES,
    )
