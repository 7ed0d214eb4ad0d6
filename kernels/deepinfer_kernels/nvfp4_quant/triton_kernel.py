"""NVFP4 quantisation on an NVIDIA GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import launch_fake_quantiser, launch_fp4_quantiser
from deepinfer_kernels.nvfp4_quant.reference import AMAX_FLOOR
from deepinfer_kernels.triton_formats import (
    e2m1_codes,
    e2m1_magnitude,
    magnitude_bits,
    nvfp4_scale,
    pack_nibbles,
    with_sign_of,
)


@triton.jit
def _nvfp4_quant_kernel(
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
    value = tl.arange(0, 16)
    x_ptrs = x_ptr + (block // ROW_BLOCKS * x_stride_m + block % ROW_BLOCKS * 16)[:, None] + value[None, :]
    x = tl.load(x_ptrs, mask=is_block[:, None], other=0.0).to(tl.float32)
    scale = nvfp4_scale(tl.max(magnitude_bits(x), axis=1), AMAX_FLOOR)
    scale_fp32 = scale.to(tl.float32)
    scaled = tl.div_rn(x, tl.zeros_like(x) + scale_fp32[:, None])
    magnitude = e2m1_magnitude(scaled)
    if IS_FAKE:
        rounded = with_sign_of(magnitude, scaled) * scale_fp32[:, None]
        out_ptrs = out_ptr + (block * 16)[:, None] + value[None, :]
        tl.store(out_ptrs, rounded.to(out_ptr.dtype.element_ty), mask=is_block[:, None])
    else:
        packed = pack_nibbles(e2m1_codes(scaled, magnitude), BLOCKS, 16)
        out_ptrs = out_ptr + (block * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(out_ptrs, packed, mask=is_block[:, None])
        tl.store(scale_ptr + block, scale.to(tl.uint8, bitcast=True), mask=is_block)


def nvfp4_quant_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on arguments ``nvfp4_quant`` has already checked."""
    return launch_fp4_quantiser(_nvfp4_quant_kernel, x, tiling.NVFP4_BLOCK, AMAX_FLOOR=AMAX_FLOOR)


def nvfp4_fake_quant_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on arguments ``nvfp4_fake_quant`` has already checked."""
    return launch_fake_quantiser(_nvfp4_quant_kernel, x, tiling.NVFP4_BLOCK, AMAX_FLOOR=AMAX_FLOOR)
