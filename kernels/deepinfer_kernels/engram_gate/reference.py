"""The Engram gate in plain PyTorch."""

import torch

from deepinfer_kernels.pointwise import sigmoid

# Largest difference from the golden vectors (fp32 values of order one).
TOLERANCE = 1e-5
# The smallest |u| the square root sees: its slope is infinite at zero (REF).
SCORE_FLOOR = 1e-6


def engram_gate_reference(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    is_image: torch.Tensor | None,
) -> torch.Tensor:
    """Gate arguments ``engram_gate`` has already checked; see there."""
    x = streams.float().contiguous()  # [T, S, d]
    k = key.float().contiguous()
    weight = q_weight.float() * k_weight.float()  # [S, d]
    dot = (x * k * weight).sum(dim=-1)  # [T, S]
    x_rstd = torch.rsqrt((x * x).mean(dim=-1) + eps)
    k_rstd = torch.rsqrt((k * k).mean(dim=-1) + eps)
    u = dot * (x_rstd * k_rstd) * streams.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(u.abs().clamp_min(SCORE_FLOOR).sqrt(), u))
    out = (x + gate[:, :, None] * value.float()[:, None, :]).to(streams.dtype)
    if is_image is None:
        return out
    return torch.where(is_image[:, None, None], streams, out)


def make_inputs(
    num_tokens: int, num_streams: int, hidden_size: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random streams, key, value, q_weight, k_weight."""
    shape = (num_tokens, num_streams, hidden_size)
    streams = torch.randn(shape, generator=generator)
    key = torch.randn(shape, generator=generator)
    value = torch.randn(num_tokens, hidden_size, generator=generator)
    q_weight = 1 + 0.1 * torch.randn(num_streams, hidden_size, generator=generator)
    k_weight = 1 + 0.1 * torch.randn(num_streams, hidden_size, generator=generator)
    return (
        streams.to(device, dtype),
        key.to(device, dtype),
        value.to(device, dtype),
        q_weight.to(device, torch.bfloat16),
        k_weight.to(device, torch.bfloat16),
    )
