"""The two rotation tables of the model: plain for ratio-0 layers, YaRN for the others."""

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_kernels.rope import YarnScaling, cos_sin, inverse_frequencies
from deepinfer_plugin.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin, [num_tokens, qk_rope_head_dim / 2] fp32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryTables(nn.Module):
    """Inverse frequencies of both tables. The layer decides which one applies, not the cache."""

    plain: torch.Tensor
    yarn: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        scaling = config.rope_scaling
        yarn = YarnScaling(
            factor=scaling.factor,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )
        dim = config.qk_rope_head_dim
        self.register_buffer("plain", inverse_frequencies(dim, config.rope_theta, None), persistent=False)
        self.register_buffer("yarn", inverse_frequencies(dim, config.compress_rope_theta, yarn), persistent=False)

    def rotation(self, positions: torch.Tensor, ratio: int) -> Rotation:
        """Rotation at ``positions`` [num_tokens] int64 for a layer of this compression ratio."""
        return Rotation(*cos_sin(positions, self.yarn if ratio else self.plain))
