"""Rotary embedding in plain PyTorch: frequencies, tables, rotation of adjacent pairs."""

import math
from dataclasses import dataclass

import torch

from deepinfer_kernels.errors import UnsupportedError

TOLERANCE_FP32 = 1e-5
TOLERANCE_BF16_ULPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """``rope_scaling`` of config.json. The amplitude of the vectors is not scaled."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            value = getattr(self, name)
            if not value > 0:
                raise UnsupportedError(f"YarnScaling: {name} is {value}, expected > 0; correct rope_scaling")


def make_inputs(
    num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [num_rows, num_heads, head_dim] and positions [num_rows] int64 below one million."""
    x = torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    return x.to(device), positions.to(device)


def _correction_dim(beta: float, rotary_dim: int, theta: float, original_length: int) -> float:
    """Index of the pair that turns ``beta`` times within the original context."""
    return rotary_dim * math.log(original_length / (2 * math.pi * beta)) / (2 * math.log(theta))


def inverse_frequencies_reference(rotary_dim: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    # At position 2^20 one ulp of a frequency turns a vector by 0.06 rad: these expressions are REF's, to the bit.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / (theta**exponents)
    if yarn is None:
        return plain
    length = yarn.original_max_position_embeddings
    low = max(math.floor(_correction_dim(yarn.beta_fast, rotary_dim, theta, length)), 0)
    high = min(math.ceil(_correction_dim(yarn.beta_slow, rotary_dim, theta, length)), rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    smooth = 1.0 - ramp.clamp(0.0, 1.0)
    return plain / yarn.factor * (1.0 - smooth) + plain * smooth


def cos_sin_reference(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.float().unsqueeze(-1) * inv_freq
    return angles.cos(), angles.sin()


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    num_pairs = cos.shape[-1]
    start = x.shape[-1] - 2 * num_pairs
    table_shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (num_pairs,)
    cos, sin = cos.view(table_shape), sin.view(table_shape)
    first, second = torch.unflatten(x[..., start:].float(), -1, (num_pairs, 2)).unbind(-1)
    out = x.clone(memory_format=torch.contiguous_format)
    out_first, out_second = torch.unflatten(out[..., start:], -1, (num_pairs, 2)).unbind(-1)
    if inverse:
        out_first.copy_((first * cos).add_(second * sin))
        out_second.copy_((second * cos).sub_(first * sin))
    else:
        out_first.copy_((first * cos).sub_(second * sin))
        out_second.copy_((second * cos).add_(first * sin))
    return out
