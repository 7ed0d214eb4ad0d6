"""RMSNorm in plain PyTorch."""

import torch

TOLERANCE_BF16_ULPS = 1
TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [num_rows, width] with scales from 1e-12 to 1e6, every seventh row zero, and a bf16 weight [width]."""
    x = torch.randn(num_rows, width, generator=generator)
    x *= 10.0 ** torch.randint(-12, 7, (num_rows, 1), generator=generator).float()
    x[6::7] = 0.0
    weight = 1.0 + 0.3 * torch.randn(width, generator=generator)
    return x.to(dtype).to(device), weight.bfloat16().to(device)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float().contiguous()
    # Root and division instead of rsqrt, which CUDA approximates.
    rstd = values.square().mean(dim=-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (values * rstd).mul_(weight).to(x.dtype)
