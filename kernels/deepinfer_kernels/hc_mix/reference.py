"""Mix logits of the hyper-connections in plain PyTorch."""

import torch

from deepinfer_kernels.row_tiles import tiled_matmul

TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, num_streams: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """streams [num_rows, S, d], every fifth row zero, and fn [(2 + S) * S, S * d] fp32."""
    streams = torch.randn(num_rows, num_streams, width, generator=generator)
    streams[4::5] = 0.0
    depth = num_streams * width
    fn = torch.randn((2 + num_streams) * num_streams, depth, generator=generator) * depth**-0.5
    return streams.to(dtype).to(device), fn.to(device)


def hc_mix_reference(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    flat = streams.float().flatten(1)
    # Root and division instead of rsqrt, which CUDA approximates.
    rstd = flat.square().mean(dim=-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return tiled_matmul(flat, fn.detach()) * rstd
