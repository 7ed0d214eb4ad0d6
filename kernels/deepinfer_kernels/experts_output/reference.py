"""Sum of all experts and update of the streams in plain PyTorch."""

import torch

from deepinfer_kernels.hc_post.reference import hc_post_reference
from deepinfer_kernels.hc_post.reference import make_inputs as make_streams
from deepinfer_kernels.moe_combine.reference import moe_combine_reference


def experts_output_reference(
    routed: torch.Tensor, shared: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    return hc_post_reference(moe_combine_reference(routed, shared), streams, post, comb)


def make_inputs(
    num_rows: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """routed [num_rows, 3, width], shared [num_rows, width], then streams, post, comb."""
    routed = torch.randn(num_rows, 3, width, generator=generator).to(device, dtype)
    return routed, *make_streams(num_rows, 4, width, dtype, device, generator)
