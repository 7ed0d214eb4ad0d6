"""Engram: hashed n-gram memory added to the residual streams in front of two layers."""

import torch
from torch import nn

from deepinfer_kernels.engram_gate import engram_gate
from deepinfer_kernels.engram_hash import engram_rows
from deepinfer_kernels.engram_lookup import engram_lookup
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.linear import QuantizedLinear, TensorModule, frozen
from deepinfer_plugin.model.shares import engram_table_rows, hash_layout, own_engram_columns


def ngram_ids(token_ids: torch.Tensor, token_map: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Compressed ids of a token and its predecessors; the pad stands before the start of the sequence.

    Args:
        token_ids: [num_tokens, max_ngram_size] int64: the token, then its predecessors; -1: before the start of the
            sequence or of the text behind the last image, and at an image itself.
        token_map: [vocab_size] int64, token id to compressed id.
        pad_id: compressed id of the pad.

    Returns:
        [num_tokens, max_ngram_size] int64 compressed ids. Every id is text, also that of the image placeholder where a
        text holds it: images are known by their spans.

    Source: spec section 2.9; REF.
    """
    return torch.where(token_ids < 0, pad_id, token_map[token_ids.clamp_min(0)])


class EngramTable(nn.Module):
    """Rows of 8-bit values with one E8M0 byte per 32 columns."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = frozen(num_rows, width, dtype=torch.float8_e4m3fn)
        self.scale = frozen(num_rows, width // 32, dtype=torch.uint8)


class Engram(TensorModule):
    """The memory of one layer. Ranks own tables by column of the hash, and outputs of the product."""

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, context: BuildContext, layer: int) -> None:
        super().__init__()
        config = context.config
        num_columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.ranks = context.parallel.tensor
        table_rows = engram_table_rows(config, context.parallel)[layer]
        self.first_row, self.columns = table_rows.start, own_engram_columns(config, context.parallel)
        self.eps = config.rms_norm_eps
        self.dtype = context.arithmetic.activation_dtype
        self.num_streams, self.hidden_size = config.hc_mult, config.hidden_size
        self.embed = EngramTable(len(table_rows), config.engram_head_dim)
        self.wkv = QuantizedLinear(
            (config.hc_mult + 1) * config.hidden_size // self.ranks.size,
            num_columns * config.engram_head_dim,
            quantize_input=context.arithmetic.quantize,
            num_shards=self.ranks.size,
        )
        self.q_weight = frozen(config.hc_mult, config.hidden_size, dtype=torch.bfloat16)
        self.k_weight = frozen(config.hc_mult, config.hidden_size, dtype=torch.bfloat16)
        layout = hash_layout(config)[layer]
        for name in ("multipliers", "primes", "offsets"):
            values = torch.tensor(getattr(layout, name), dtype=torch.int64)
            self.register_buffer(name, values, persistent=False)

    def forward(
        self, streams: torch.Tensor, compressed_ids: torch.Tensor, is_image: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the gated memory of each row's n-grams.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            compressed_ids: [num_tokens, engram_max_ngram_size] int64, see ``ngram_ids``.
            is_image: [num_tokens] bool, rows that stay as they are; None: no row.

        Returns:
            New streams, same shape and dtype.
        """
        rows = engram_rows(compressed_ids, self.multipliers, self.primes, self.offsets)
        if not self.ranks.is_alone:
            rows = rows[:, self.columns.start : self.columns.stop] - self.first_row
        memory = engram_lookup(self.embed.weight, self.embed.scale, rows.contiguous(), self.dtype)
        key_value = self.ranks.gather_columns(self.wkv(self.ranks.gather_columns(memory)))
        key, value = torch.split(key_value, [self.num_streams * self.hidden_size, self.hidden_size], dim=1)
        key = key.view(-1, self.num_streams, self.hidden_size)
        return engram_gate(streams, key, value, self.q_weight, self.k_weight, self.eps, is_image)
