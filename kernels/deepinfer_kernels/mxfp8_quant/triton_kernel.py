"""MXFP8 quantisation on an NVIDIA GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import launch_fake_quantiser, launch_quantiser
from deepinfer_kernels.triton_formats import e4m3_codes, exponent_ceiling, magnitude_bits, mxfp8_round


@triton.jit
def _mxfp8_quant_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    num_blocks,
    x_stride_m,
    ROW_BLOCKS: tl.constexpr,
    IS_FAKE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    value = tl.arange(0, 32)
    x_ptrs = x_ptr + (block // ROW_BLOCKS * x_stride_m + block % ROW_BLOCKS * 32)[:, None] + value[None, :]
    x = tl.load(x_ptrs, mask=is_block[:, None], other=0.0).to(tl.float32)
    amax_bits = tl.max(magnitude_bits(x), axis=1)
    out_ptrs = out_ptr + (block * 32)[:, None] + value[None, :]
    if IS_FAKE:
        tl.store(out_ptrs, mxfp8_round(x, amax_bits[:, None]).to(out_ptr.dtype.element_ty), mask=is_block[:, None])
    else:
        exponent = exponent_ceiling(amax_bits, 1e-4, 1.0 / 448.0)
        tl.store(out_ptrs, e4m3_codes(x, exponent[:, None]), mask=is_block[:, None])
        tl.store(scale_ptr + block, exponent.to(tl.uint8), mask=is_block)


def mxfp8_quant_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``mxfp8_quant`` has already checked."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // tiling.MX_BLOCK), dtype=torch.uint8, device=x.device)
    launch_quantiser(_mxfp8_quant_kernel, x, codes, scale, tiling.MX_BLOCK, IS_FAKE=False)
    return codes, scale


def mxfp8_fake_quant_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on arguments ``mxfp8_fake_quant`` has already checked."""
    return launch_fake_quantiser(_mxfp8_quant_kernel, x, tiling.MX_BLOCK)
