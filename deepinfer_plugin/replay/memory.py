"""What the windows behind a cached prefix cost, per boundary and per token. Loads neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.replay.settings import EncoderPolicy

MXFP8_BLOCK, NVFP4_BLOCK, MXFP4_BLOCK = 32, 16, 32  # values that share a scale byte
WINDOW_BLOCK = 32  # tokens in a page of window records
BLOCK = 128  # tokens in a block of the growing caches: hits end on its multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCost:
    """Bytes that a cached prefix holds, and rows that a hit on it computes again.

    Attributes:
        policy: encoder policy.
        boundary_tokens: a hit can end at every multiple of it.
        growing_bytes_per_token: compressed KV and index keys.
        window_bytes_per_boundary: records of encoder windows kept for each boundary.
        pool_bytes_per_boundary: what vLLM's pool holds for them: a block of the pool carries as many window pages of
            one group as fit into it.
        replayed_rows_per_hit: encoder rows that a hit computes again.
        replayed_rows_per_boundary: encoder rows that every run computes again at a boundary.
    """

    policy: EncoderPolicy
    boundary_tokens: int
    growing_bytes_per_token: float
    window_bytes_per_boundary: int
    pool_bytes_per_boundary: int
    replayed_rows_per_hit: int
    replayed_rows_per_boundary: int

    @property
    def bytes_per_token(self) -> float:
        """Records of a token of a long cached prefix."""
        return self.growing_bytes_per_token + self.window_bytes_per_boundary / self.boundary_tokens

    def to_text(self) -> str:
        """One line for a person."""
        boundary = (
            f"{self.window_bytes_per_boundary:,} B of windows at each multiple of {self.boundary_tokens} tokens "
            f"({self.pool_bytes_per_boundary:,} B of vLLM's pool)"
            if self.window_bytes_per_boundary
            else f"no windows; hits end at multiples of {self.boundary_tokens} tokens"
        )
        again = f"a hit computes {self.replayed_rows_per_hit} encoder rows again"
        if self.replayed_rows_per_boundary:
            again = f"every run computes {self.replayed_rows_per_boundary} encoder rows again there"
        return f"{self.bytes_per_token:,.0f} B per cached token: {boundary}; {again}"


def window_record_bytes(head_dim: int) -> int:
    """MXFP8: a byte per value and one per block."""
    return head_dim + head_dim // MXFP8_BLOCK


def growing_bytes_per_token(config: ModelConfig) -> float:
    """Compressed KV (NVFP4) and index keys (MXFP4) of all KV sources."""
    entry = config.head_dim // 2 + config.head_dim // NVFP4_BLOCK
    key = config.index_head_dim // 2 + config.index_head_dim // MXFP4_BLOCK
    return sum((entry + key) / config.compress_ratios[layer] for layer in config.kv_source_layer_ids)


def pool_block_bytes(config: ModelConfig) -> int:
    """Bytes of a block of the pool that all caches share: a block of the growing caches, where it is the widest."""
    return int(BLOCK * growing_bytes_per_token(config))


def window_groups(num_layers: int, config: ModelConfig) -> int:
    """Groups into which vLLM puts the windows of so many layers, a block of the pool for one page of each."""
    per_block = pool_block_bytes(config) // (WINDOW_BLOCK * window_record_bytes(config.head_dim))
    return -(-num_layers // per_block)


def prefix_cost(config: ModelConfig, policy: EncoderPolicy) -> PrefixCost:
    """The cost of a cached prefix under decoder replay, whose decoder windows are never kept."""
    num_encoder_layers = config.kv_source_layer_ids[-1]
    pages = -(-(config.sliding_window - 1) // WINDOW_BLOCK)  # as many as vLLM's manager asks of a hit
    is_kept = policy.kind == "exact"
    return PrefixCost(
        policy=policy,
        boundary_tokens=policy.segment or BLOCK,
        growing_bytes_per_token=growing_bytes_per_token(config),
        window_bytes_per_boundary=is_kept
        * num_encoder_layers
        * pages
        * WINDOW_BLOCK
        * window_record_bytes(config.head_dim),
        pool_bytes_per_boundary=is_kept * window_groups(num_encoder_layers, config) * pages * pool_block_bytes(config),
        replayed_rows_per_hit=0 if is_kept else config.sliding_window,
        replayed_rows_per_boundary=config.sliding_window if policy.segment else 0,
    )
