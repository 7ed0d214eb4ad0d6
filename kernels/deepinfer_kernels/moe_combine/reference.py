"""The sum of the expert outputs in plain PyTorch."""

import torch


def moe_combine_reference(expert_out: torch.Tensor, shared_out: torch.Tensor) -> torch.Tensor:
    """Add arguments ``moe_combine`` has already checked; see there."""
    total = expert_out[:, 0].float()
    for slot in range(1, expert_out.shape[1]):
        total = total + expert_out[:, slot]  # fp32 plus bf16 is fp32
    return (total + shared_out).to(shared_out.dtype)


def make_inputs(
    num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random expert_out and shared_out."""
    expert_out = torch.randn(num_tokens, top_k, hidden_size, generator=generator)
    shared_out = torch.randn(num_tokens, hidden_size, generator=generator)
    return expert_out.to(device, dtype), shared_out.to(device, dtype)
