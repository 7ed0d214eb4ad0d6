"""NVFP4 in plain PyTorch: e2m1 codes with one e4m3 scale per 16 values, and no scale of the whole tensor."""

import torch

from deepinfer_kernels.microscaling import E2M1_MAX, pack_e2m1, round_to_e2m1, unpack_e2m1
from deepinfer_kernels.tiling import NVFP4_BLOCK

E4M3_MAX = 448.0
AMAX_FLOOR = E2M1_MAX * 2.0**-9  # the scale of a block of zeros is 2^-9, the smallest e4m3
TOLERANCE = 0  # codes, scales and values are exact


def make_inputs(num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """Rows [num_rows, width] of normal values with row scales from 2^-12 to 2^12; every fifth row is zero."""
    x = torch.randn(num_rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, (num_rows, 1), generator=generator).float())
    x[4::5] = 0.0
    return x.to(dtype).to(device)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e2m1 values fp32 [..., K/16, 16], scales e4m3 and the same in fp32, both [..., K/16, 1]."""
    blocks = torch.unflatten(x.float(), -1, (x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min_(AMAX_FLOOR)
    # True divisions: with the reciprocal of 6, or of the scale, ties fall the other way.
    scale = amax.div_(E2M1_MAX).clamp_max_(E4M3_MAX).to(torch.float8_e4m3fn)
    scale_fp32 = scale.float()
    return round_to_e2m1(blocks / scale_fp32), scale, scale_fp32


def nvfp4_quant_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale, _ = _rounded(x)
    return pack_e2m1(values.flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def nvfp4_dequant_reference(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = torch.unflatten(unpack_e2m1(packed), -1, (scale.shape[-1], NVFP4_BLOCK))
    return blocks.mul_(scale.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2).to(dtype)


def nvfp4_fake_quant_reference(x: torch.Tensor) -> torch.Tensor:
    values, _, scale_fp32 = _rounded(x)
    return values.mul_(scale_fp32).flatten(-2).to(x.dtype)
