"""Linear layers in plain PyTorch: exact operands, fp32 accumulation, fixed row tiles."""

import torch

from deepinfer_kernels.dense_cache import dense
from deepinfer_kernels.microscaling import e8m0_to_float
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference
from deepinfer_kernels.row_tiles import tiled_matmul
from deepinfer_kernels.tiling import MX_BLOCK

TOLERANCE_BF16_ULPS = 1
TOLERANCE_FP32 = 1e-5  # relative to sums of order 1


def make_inputs(
    num_rows: int, num_out: int, depth: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [num_rows, depth], an e4m3 weight [num_out, depth] and its scale bytes, outputs of order 1."""
    x = torch.randn(num_rows, depth, generator=generator).to(dtype)
    weight = (torch.randn(num_out, depth, generator=generator) * 4).to(torch.float8_e4m3fn)
    grid = (-(-num_out // MX_BLOCK), depth // MX_BLOCK)
    scale = torch.randint(119, 123, grid, generator=generator, dtype=torch.uint8)
    return x.to(device), weight.to(device), scale.to(device)


def dequantize_blocks_reference(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    row_scale = e8m0_to_float(scale).repeat_interleave(MX_BLOCK, dim=0)[: weight.shape[0]]
    blocks = torch.unflatten(weight.float(), -1, (scale.shape[1], MX_BLOCK))
    return blocks.mul_(row_scale.unsqueeze(-1)).flatten(-2).to(dtype)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    is_dense = weight.dtype == torch.float32
    values = weight.detach() if is_dense else dense(weight, lambda: weight.detach().float())
    return tiled_matmul(x.float(), values).to(out_dtype)


def _dense_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    def make() -> torch.Tensor:
        return dequantize_blocks_reference(weight.detach(), scale.detach(), torch.float32)

    return dense(weight, make, depends_on=(scale,))


def mxfp8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype, quantize_input: bool
) -> torch.Tensor:
    values = x.float()
    if quantize_input:
        values = mxfp8_fake_quant_reference(values)
    return tiled_matmul(values, _dense_blocks(weight, scale)).to(out_dtype)


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    num_groups = x.shape[1]
    groups = _dense_blocks(weight, scale).chunk(num_groups)
    values = x.float()
    return torch.stack([tiled_matmul(values[:, g], groups[g]) for g in range(num_groups)], dim=1).to(out_dtype)
