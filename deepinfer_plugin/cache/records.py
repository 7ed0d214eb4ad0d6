"""Bytes of every KV record of the model, from its configuration and the arithmetic mode."""

from dataclasses import dataclass

from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.settings import Arithmetic

MIN_PAIR_STATE_ROWS = 8
"""Rows of a ratio-2 pair ring; a power of two, so that a position addresses it without division."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRecords:
    """Formats of the three packed records and the size of the pair ring's rows.

    At the released size: 528 bytes a token and layer in the window, 288 bytes a compressed entry,
    68 bytes an index key. Source: spec section 6.1.
    """

    head_dim: int
    index_head_dim: int
    window_format: RecordFormat
    compressed_format: RecordFormat
    index_format: RecordFormat

    @classmethod
    def from_model(cls, config: ModelConfig, arithmetic: Arithmetic) -> "KVRecords":
        return cls(
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            window_format=arithmetic.window_format,
            compressed_format=arithmetic.compressed_format,
            index_format=arithmetic.index_format,
        )

    @property
    def window_bytes(self) -> int:
        return self.window_format.record_bytes(self.head_dim)

    @property
    def compressed_bytes(self) -> int:
        return self.compressed_format.record_bytes(self.head_dim)

    @property
    def index_bytes(self) -> int:
        return self.index_format.record_bytes(self.index_head_dim)

    @property
    def pair_state_bytes(self) -> int:
        """One fp32 latent and one fp32 score of ``head_dim`` values."""
        return 2 * self.head_dim * 4

    def growing_bytes_per_token(self, config: ModelConfig) -> float:
        """Bytes that one more token of context costs: 890 at the released size."""
        entry = self.compressed_bytes + self.index_bytes
        return sum(entry / config.compress_ratios[layer] for layer in config.kv_source_layer_ids)


def pair_state_rows(num_drafts: int) -> int:
    """Rows of the ring of unpaired tokens: a verify step stores its drafts before it knows which are accepted."""
    rows = MIN_PAIR_STATE_ROWS
    while rows < num_drafts + 2:
        rows *= 2
    return rows
