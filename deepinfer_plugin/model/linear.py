"""Parameters of the linear layers and norms, under the names and in the formats of the checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepinfer_kernels.linear import grouped_linear, linear, mxfp8_linear
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


class QuantizedLinear(QuantizedWeight):
    """``x @ weight.T`` with MXFP8 weights; activations are quantised per 32 columns where the mode asks for it."""

    def __init__(self, out_features: int, in_features: int, *, quantize_input: bool) -> None:
        super().__init__(out_features, in_features)
        self.quantize_input = quantize_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features], dtype of ``x``."""
        return mxfp8_linear(x, self.weight, self.scale, out_dtype=x.dtype, quantize_input=self.quantize_input)


class GroupedQuantizedLinear(QuantizedWeight):
    """Block-diagonal projection of the attention output; its input stays unquantised (REF)."""

    def __init__(self, num_groups: int, out_features: int, in_features: int) -> None:
        super().__init__(num_groups * out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_groups, in_features] -> [num_tokens, num_groups, out_features]."""
        return grouped_linear(x, self.weight, self.scale, out_dtype=x.dtype)


class PlainLinear(TensorModule):
    """``x @ weight.T`` with bf16 weights, accumulated in fp32."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = frozen(out_features, in_features, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features], dtype of ``x`` unless ``out_dtype`` says."""
        return linear(x, self.weight, out_dtype=out_dtype or x.dtype)


class RMSNorm(TensorModule):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen(width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
