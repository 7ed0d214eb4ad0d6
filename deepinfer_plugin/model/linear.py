"""Parameters of the linear layers and norms, under the names and in the formats of the checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from deepinfer_batch_invariant.collectives import ALONE, Ranks
from deepinfer_kernels.linear import linear, mxfp8_linear, mxfp8_prepared_linear
from deepinfer_kernels.linear.weights import Weight
from deepinfer_kernels.rms_norm import rms_norm

SCALE_BLOCK = 32
"""Rows and columns of a weight that share one E8M0 scale."""


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that a checkpoint fills; no gradient, since fp8 and uint8 have none."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class TensorModule(nn.Module):
    """A module that returns one tensor; ``nn.Module`` alone does not say so."""

    if TYPE_CHECKING:
        __call__: Callable[..., torch.Tensor]


class QuantizedWeight(TensorModule):
    """MXFP8 weight [out_features, in_features] e4m3 with one E8M0 byte per 32 x 32 block."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        rows, cols = -(-out_features // SCALE_BLOCK), in_features // SCALE_BLOCK
        self.weight = frozen(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.scale = frozen(rows, cols, dtype=torch.uint8)

    @property
    def tensors(self) -> Weight:
        """Weight and scale."""
        return self.weight, self.scale


def place_in_one(first: QuantizedWeight, second: QuantizedWeight) -> None:
    """Let the weight of ``second`` follow that of ``first`` in memory: a GPU then multiplies both at once, in place."""
    for name in ("weight", "scale"):
        before, after = getattr(first, name), getattr(second, name)
        both = torch.empty((before.shape[0] + after.shape[0], before.shape[1]), dtype=before.dtype)
        setattr(first, name, nn.Parameter(both[: before.shape[0]], requires_grad=False))
        setattr(second, name, nn.Parameter(both[before.shape[0] :], requires_grad=False))


class QuantizedLinear(QuantizedWeight):
    """``x @ weight.T`` with MXFP8 weights; activations are quantised per 32 columns where the mode asks for it.

    ``out_features`` are those of this rank, one of ``num_shards``.
    """

    def __init__(self, out_features: int, in_features: int, *, quantize_input: bool, num_shards: int = 1) -> None:
        super().__init__(out_features, in_features)
        self.quantize_input, self.num_shards = quantize_input, num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features], dtype of ``x``."""
        return mxfp8_linear(
            x,
            self.weight,
            self.scale,
            out_dtype=x.dtype,
            quantize_input=self.quantize_input,
            num_shards=self.num_shards,
        )


class PreparedLinear(QuantizedWeight):
    """The same behind an operation that has prepared, and where the mode asks for it quantised, the rows."""

    def __init__(self, out_features: int, in_features: int, *, num_shards: int = 1) -> None:
        super().__init__(out_features, in_features)
        self.num_shards = num_shards

    def forward(self, rows: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """rows: [num_tokens, ...] -> [num_tokens, out_features] of ``out_dtype``."""
        return mxfp8_prepared_linear(rows, self.weight, self.scale, out_dtype=out_dtype, num_shards=self.num_shards)


class PlainLinear(TensorModule):
    """``x @ weight.T`` with bf16 weights, accumulated in fp32."""

    def __init__(self, out_features: int, in_features: int, *, num_shards: int = 1) -> None:
        super().__init__()
        self.num_shards = num_shards
        self.weight = frozen(out_features, in_features, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features], dtype of ``x`` unless ``out_dtype`` says."""
        return linear(x, self.weight, out_dtype=out_dtype or x.dtype, num_shards=self.num_shards)


class Head(PlainLinear):
    """From hidden states to logits; every rank owns an equal run of the vocabulary."""

    def __init__(self, vocab_size: int, width: int, ranks: Ranks) -> None:
        super().__init__(vocab_size // ranks.size, width, num_shards=ranks.size)
        self.ranks = ranks

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [num_tokens, width] -> [num_tokens, vocab_size], on every rank."""
        return self.ranks.gather_columns(super().forward(x, out_dtype))


class Embedding(TensorModule):
    """Rows of a table by token id, bf16 as stored; ranks own equal runs of them."""

    def __init__(self, vocab_size: int, width: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = frozen(vocab_size // ranks.size, width, dtype=torch.bfloat16)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, width] bf16."""
        if self.ranks.is_alone:
            return functional.embedding(token_ids, self.weight)
        owner, row = token_ids // self.weight.shape[0], token_ids % self.weight.shape[0]
        return self.ranks.merge_rows(functional.embedding(row, self.weight), owner.int())


class RMSNorm(TensorModule):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen(width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
