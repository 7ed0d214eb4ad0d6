"""Output projections of attention and update of the streams in plain PyTorch."""

import torch

from deepinfer_kernels.hc_post.reference import hc_post_reference
from deepinfer_kernels.hc_post.reference import make_inputs as make_streams
from deepinfer_kernels.linear.reference import grouped_linear_reference, mxfp8_linear_reference
from deepinfer_kernels.linear.reference import make_inputs as make_linear_inputs
from deepinfer_kernels.linear.weights import Weight

TOLERANCE_FP32 = 1e-5


def attention_output_reference(
    out: torch.Tensor,
    wo_a: Weight,
    wo_b: Weight,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    quantize: bool,
) -> torch.Tensor:
    low = grouped_linear_reference(out, *wo_a, out.dtype).flatten(1)
    return hc_post_reference(mxfp8_linear_reference(low, *wo_b, out.dtype, quantize), streams, post, comb)


def make_inputs(
    num_rows: int, groups: int, low: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """out [num_rows, groups, 64], weights and scales of wo_a and wo_b, then streams, post, comb."""
    made = [torch.randn(num_rows, groups, 64, generator=generator).to(dtype)]
    for num_out, depth in ((groups * low, 64), (width, groups * low)):
        made += make_linear_inputs(0, num_out, depth, dtype, "cpu", generator)[1:]
    made += make_streams(num_rows, 4, width, dtype, "cpu", generator)[1:]
    return tuple(tensor.to(device) for tensor in made)
