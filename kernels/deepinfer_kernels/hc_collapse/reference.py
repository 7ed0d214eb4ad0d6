"""Collapse of the residual streams in plain PyTorch."""

import torch

TOLERANCE_BF16_ULPS = 0  # products and sums in one order: exact
TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, num_streams: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """streams [num_rows, S, d] and pre [num_rows, S] fp32 between 0 and 1."""
    streams = torch.randn(num_rows, num_streams, width, generator=generator).to(dtype)
    pre = torch.rand(num_rows, num_streams, generator=generator)
    return streams.to(device), pre.to(device)


def hc_collapse_reference(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    weighted = (streams * pre.unsqueeze(-1)).unbind(1)
    total = weighted[0]
    for part in weighted[1:]:
        total = total + part
    return total.to(streams.dtype)
