"""MXFP4 in plain PyTorch: e2m1 codes with one power-of-two scale per 32 values."""

import torch

from deepinfer_kernels.microscaling import (
    E2M1_MAX,
    e8m0_to_float,
    exponent_ceiling_bytes,
    pack_e2m1,
    power_of_two,
    round_to_e2m1,
    unpack_e2m1,
)
from deepinfer_kernels.tiling import MX_BLOCK

AMAX_FLOOR = E2M1_MAX * 2.0**-126  # the scale of a block of zeros is 2^-126, the smallest normal fp32
TOLERANCE = 0  # codes, scales and values are exact


def make_inputs(num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """Rows [num_rows, width] of normal values with row scales from 2^-12 to 2^12; every fifth row is zero."""
    x = torch.randn(num_rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, (num_rows, 1), generator=generator).float())
    x[4::5] = 0.0
    return x.to(dtype).to(device)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e2m1 values fp32 [..., K/32, 32], exponent bytes int32 and scales fp32, both [..., K/32, 1]."""
    blocks = torch.unflatten(x.float(), -1, (x.shape[-1] // MX_BLOCK, MX_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min_(AMAX_FLOOR)
    exponent_bytes = exponent_ceiling_bytes(amax.mul_(1.0 / E2M1_MAX))
    scale = power_of_two(exponent_bytes)
    return round_to_e2m1(blocks / scale), exponent_bytes, scale


def mxfp4_quant_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, exponent_bytes, _ = _rounded(x)
    return pack_e2m1(values.flatten(-2)), exponent_bytes.squeeze(-1).to(torch.uint8)


def mxfp4_dequant_reference(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = torch.unflatten(unpack_e2m1(packed), -1, (scale.shape[-1], MX_BLOCK))
    return blocks.mul_(e8m0_to_float(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp4_fake_quant_reference(x: torch.Tensor) -> torch.Tensor:
    values, _, scale = _rounded(x)
    return values.mul_(scale).flatten(-2).to(x.dtype)
