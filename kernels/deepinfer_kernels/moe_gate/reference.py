"""The router in plain PyTorch."""

import torch

from deepinfer_kernels.linear import linear
from deepinfer_kernels.pointwise import softplus

# Largest difference of the weights from the golden vectors; the selected experts are exact.
TOLERANCE = 1e-5
# Added to the sum of the selected scores, which can underflow to zero (REF).
SUM_EPS = 1e-20


def moe_gate_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scaling: float,
    bias_image: torch.Tensor | None,
    is_image: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route arguments ``moe_gate`` has already checked; see there."""
    scores = softplus(linear(x, weight, out_dtype=torch.float32)).sqrt()  # [T, E]
    if bias_image is None or is_image is None:
        biased = scores + bias
    else:
        biased = scores + torch.where(is_image[:, None], bias_image, bias)
    # A stable sort keeps equal scores in ascending id; torch.topk promises no order.
    ranked = torch.sort(biased, dim=-1, descending=True, stable=True).indices
    chosen = torch.sort(ranked[:, :top_k], dim=-1).values  # [T, k] int64, ascending id
    weights = scores.gather(1, chosen)
    if top_k > 1:
        total = weights[:, 0]
        for slot in range(1, top_k):
            total = total + weights[:, slot]
        weights = weights / (total + SUM_EPS)[:, None]
    return chosen.to(torch.int32), weights * scaling


def make_inputs(
    num_tokens: int, hidden_size: int, num_experts: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x, weight, bias, bias_image."""
    x = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = 1.5 * hidden_size**-0.5 * torch.randn(num_experts, hidden_size, generator=generator)
    bias = 0.1 * torch.randn(num_experts, generator=generator)
    bias_image = 0.3 * torch.randn(num_experts, generator=generator)
    return x.to(device, dtype), weight.to(device, torch.bfloat16), bias.to(device), bias_image.to(device)
