"""Latent queries and keys in plain PyTorch."""

import torch

from deepinfer_kernels.linear.reference import make_inputs as make_linear_inputs
from deepinfer_kernels.linear.reference import mxfp8_linear_reference
from deepinfer_kernels.linear.weights import Weight
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference
from deepinfer_kernels.rms_norm.reference import rms_norm_reference

TOLERANCE_FP32 = 1e-5


def latent_projections_reference(
    rows: torch.Tensor,
    q_weight: Weight,
    kv_weight: Weight,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
    quantize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    query = rms_norm_reference(mxfp8_linear_reference(rows, *q_weight, out_dtype, False), q_norm, eps)
    key_value = rms_norm_reference(mxfp8_linear_reference(rows, *kv_weight, out_dtype, False), kv_norm, eps)
    return mxfp8_fake_quant_reference(query) if quantize else query, key_value


def make_inputs(
    num_rows: int, q_rank: int, kv_width: int, depth: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """x [num_rows, depth], then weight and scale of queries and of keys, then the weights of both norms."""
    made = [torch.randn(num_rows, depth, generator=generator).to(dtype)]
    for width in (q_rank, kv_width):
        made += make_linear_inputs(0, width, depth, dtype, "cpu", generator)[1:]
    made += [(1.0 + 0.3 * torch.randn(width, generator=generator)).bfloat16() for width in (q_rank, kv_width)]
    return tuple(tensor.to(device) for tensor in made)
