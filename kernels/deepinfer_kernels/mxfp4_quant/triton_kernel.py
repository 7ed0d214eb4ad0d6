"""MXFP4 quantisation on an NVIDIA GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import launch_fake_quantiser, launch_fp4_quantiser
from deepinfer_kernels.mxfp4_quant.reference import AMAX_FLOOR
from deepinfer_kernels.triton_formats import (
    e2m1_codes,
    e2m1_magnitude,
    exponent_ceiling,
    magnitude_bits,
    pack_nibbles,
    power_of_two,
    reciprocal_power,
    with_sign_of,
)


@triton.jit
def _mxfp4_quant_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    num_blocks,
    x_stride_m,
    AMAX_FLOOR: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    IS_FAKE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    value = tl.arange(0, 32)
    x_ptrs = x_ptr + (block // ROW_BLOCKS * x_stride_m + block % ROW_BLOCKS * 32)[:, None] + value[None, :]
    x = tl.load(x_ptrs, mask=is_block[:, None], other=0.0).to(tl.float32)
    exponent = exponent_ceiling(tl.max(magnitude_bits(x), axis=1), AMAX_FLOOR, 1.0 / 6.0)
    scaled = x * reciprocal_power(exponent)[:, None]
    magnitude = e2m1_magnitude(scaled)
    if IS_FAKE:
        rounded = with_sign_of(magnitude, scaled) * power_of_two(exponent)[:, None]
        out_ptrs = out_ptr + (block * 32)[:, None] + value[None, :]
        tl.store(out_ptrs, rounded.to(out_ptr.dtype.element_ty), mask=is_block[:, None])
    else:
        packed = pack_nibbles(e2m1_codes(scaled, magnitude), BLOCKS, 32)
        out_ptrs = out_ptr + (block * 16)[:, None] + tl.arange(0, 16)[None, :]
        tl.store(out_ptrs, packed, mask=is_block[:, None])
        tl.store(scale_ptr + block, exponent.to(tl.uint8), mask=is_block)


def mxfp4_quant_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``mxfp4_quant`` has already checked."""
    return launch_fp4_quantiser(_mxfp4_quant_kernel, x, tiling.MX_BLOCK, AMAX_FLOOR=AMAX_FLOOR)


def mxfp4_fake_quant_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on arguments ``mxfp4_fake_quant`` has already checked."""
    return launch_fake_quantiser(_mxfp4_quant_kernel, x, tiling.MX_BLOCK, AMAX_FLOOR=AMAX_FLOOR)
