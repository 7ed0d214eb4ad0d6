"""MXFP8 in plain PyTorch: e4m3 codes with one power-of-two scale per 32 values."""

import torch

from deepinfer_kernels.microscaling import e8m0_to_float, exponent_ceiling_bytes, power_of_two
from deepinfer_kernels.tiling import MX_BLOCK

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4  # REF-K act_quant: the scale of a block of zeros is 2^-22
TOLERANCE = 0  # codes, scales and values are exact


def make_inputs(num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """Rows [num_rows, width] of normal values with row scales from 2^-12 to 2^12; every fifth row is zero."""
    x = torch.randn(num_rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, (num_rows, 1), generator=generator).float())
    x[4::5] = 0.0
    return x.to(dtype).to(device)


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., K/32, 32] e4m3, exponent bytes int32 and scales fp32, both [..., K/32, 1]."""
    blocks = torch.unflatten(x.float(), -1, (x.shape[-1] // MX_BLOCK, MX_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min_(AMAX_FLOOR)
    exponent_bytes = exponent_ceiling_bytes(amax.mul_(1.0 / E4M3_MAX))
    scale = power_of_two(exponent_bytes)
    codes = (blocks / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, exponent_bytes, scale


def mxfp8_quant_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, exponent_bytes, _ = _scaled(x)
    return codes.flatten(-2), exponent_bytes.squeeze(-1).to(torch.uint8)


def mxfp8_dequant_reference(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = torch.unflatten(codes.float(), -1, (scale.shape[-1], MX_BLOCK))
    return blocks.mul_(e8m0_to_float(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp8_fake_quant_reference(x: torch.Tensor) -> torch.Tensor:
    codes, _, scale = _scaled(x)
    return codes.float().mul_(scale).flatten(-2).to(x.dtype)
