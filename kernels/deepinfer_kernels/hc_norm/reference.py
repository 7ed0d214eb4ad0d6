"""Collapse, norm and quantisation of a sublayer's input in plain PyTorch."""

import torch

from deepinfer_kernels.hc_collapse.reference import hc_collapse_reference
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference
from deepinfer_kernels.rms_norm.reference import rms_norm_reference

TOLERANCE_FP32 = 1e-5


def make_inputs(
    num_rows: int, num_streams: int, width: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams [num_rows, S, width], pre [num_rows, S] fp32 between 0 and 1, and a bf16 weight [width]."""
    streams = torch.randn(num_rows, num_streams, width, generator=generator).to(dtype)
    pre = torch.rand(num_rows, num_streams, generator=generator)
    weight = 1.0 + 0.3 * torch.randn(width, generator=generator)
    return streams.to(device), pre.to(device), weight.bfloat16().to(device)


def hc_norm_reference(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, quantize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x = rms_norm_reference(hc_collapse_reference(streams, pre), weight, eps)
    return x, mxfp8_fake_quant_reference(x) if quantize else x
