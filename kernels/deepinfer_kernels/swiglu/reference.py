"""Clamped SwiGLU in plain PyTorch."""

import torch

from deepinfer_kernels.pointwise import silu

TOLERANCE_BF16_ULPS = 1
TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up [num_rows, width] that pass 10 on both sides, and row weights [num_rows] fp32."""
    gate = (torch.randn(num_rows, width, generator=generator) * 8).to(dtype)
    up = (torch.randn(num_rows, width, generator=generator) * 8).to(dtype)
    row_weight = torch.rand(num_rows, generator=generator)
    return gate.to(device), up.to(device), row_weight.to(device)


def swiglu_reference(
    gate: torch.Tensor, up: torch.Tensor, limit: float, row_weight: torch.Tensor | None
) -> torch.Tensor:
    gate_fp32, up_fp32 = gate.float(), up.float()
    if limit > 0:
        gate_fp32, up_fp32 = gate_fp32.clamp_max(limit), up_fp32.clamp(-limit, limit)
    hidden = silu(gate_fp32).mul_(up_fp32)
    if row_weight is not None:
        hidden.mul_(row_weight.unsqueeze(-1))
    return hidden.to(gate.dtype)
