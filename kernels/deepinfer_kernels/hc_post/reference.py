"""Update of the residual streams in plain PyTorch. Axes: T tokens, I source stream, J destination stream, d width."""

import torch

TOLERANCE_BF16_ULPS = 1
TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, num_streams: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y [num_rows, d], streams [num_rows, S, d], post [num_rows, S] and comb [num_rows, S, S]."""
    y = torch.randn(num_rows, width, generator=generator).to(dtype)
    streams = torch.randn(num_rows, num_streams, width, generator=generator).to(dtype)
    post = torch.rand(num_rows, num_streams, generator=generator) * 2
    comb = torch.rand(num_rows, num_streams, num_streams, generator=generator) / num_streams
    return y.to(device), streams.to(device), post.to(device), comb.to(device)


def hc_post_reference(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    sources, weights = streams.unbind(1), comb.unbind(1)
    total_TJd = sources[0].unsqueeze(1) * weights[0].unsqueeze(-1)
    for source_Td, weight_TJ in zip(sources[1:], weights[1:], strict=True):
        total_TJd += source_Td.unsqueeze(1) * weight_TJ.unsqueeze(-1)
    total_TJd += y.unsqueeze(1) * post.unsqueeze(-1)
    return total_TJd.to(y.dtype)
