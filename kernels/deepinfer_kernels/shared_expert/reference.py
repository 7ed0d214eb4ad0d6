"""The shared expert in plain PyTorch."""

import torch

from deepinfer_kernels.linear.reference import make_inputs as make_linear_inputs
from deepinfer_kernels.linear.reference import mxfp8_linear_reference
from deepinfer_kernels.linear.weights import Weight
from deepinfer_kernels.swiglu.reference import swiglu_reference


def shared_expert_reference(
    rows: torch.Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float, out_dtype: torch.dtype, quantize: bool
) -> torch.Tensor:
    gate, up = (mxfp8_linear_reference(rows, *weight, out_dtype, False) for weight in (w1, w3))
    return mxfp8_linear_reference(swiglu_reference(gate, up, limit, None), *w2, out_dtype, quantize)


def make_inputs(
    num_rows: int, width: int, inner: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """x [num_rows, width], then weights and scales of w1, w3 and w2."""
    made = [torch.randn(num_rows, width, generator=generator).to(dtype)]
    for num_out, depth in ((inner, width), (inner, width), (width, inner)):
        made += make_linear_inputs(0, num_out, depth, dtype, "cpu", generator)[1:]
    return tuple(tensor.to(device) for tensor in made)
