"""MXFP4: e2m1 codes, two to a byte, with one power-of-two scale (E8M0) per 32 values of the last axis."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.mxfp4_quant.reference import (
    mxfp4_dequant_reference,
    mxfp4_fake_quant_reference,
    mxfp4_quant_reference,
)
from deepinfer_kernels.tiling import MX_BLOCK


def mxfp4_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every 32 values of the last axis.

    The scale is 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6))), from the exponent bits of the fp32 product; the code
    is the e2m1 number nearest to x / scale, ties to the even code, saturating at 6.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 32, any strides.

    Returns:
        packed [..., K/2] uint8, even column in the low nibble, and scale [..., K/32] uint8 (exponent + 127), new
        tensors. A block with NaN or infinity gets scale 255.

    Raises:
        ShapeError: K is not a multiple of 32.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 32 values only.
    Source: REF-K fp4_act_quant, block 32.
    """
    checks.require_activation("mxfp4_quant", "x", x)
    checks.require_multiple("mxfp4_quant", "x", x, MX_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.mxfp4_quant.triton_kernel import mxfp4_quant_triton

        return mxfp4_quant_triton(x)
    return mxfp4_quant_reference(x)


def mxfp4_dequant(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of MXFP4 codes; exact in bf16 and in fp32 for scales from 2^-126 on.

    Args:
        packed: [..., K/2] uint8, even column in the low nibble.
        scale: [..., K/32] uint8, exponent + 127; 255 is NaN.
        dtype: bf16 or fp32.

    Returns:
        [..., K] of ``dtype``, a new tensor.

    Raises:
        ShapeError: K is not a multiple of 32, or ``scale`` does not fit ``packed``.
        UnsupportedError: a dtype is another one.

    Invariance: exact; an element depends on its code and scale only.
    Source: specification, section 5.2.
    """
    checks.require_dtype("mxfp4_dequant", "packed", packed, (torch.uint8,))
    checks.require_dtype("mxfp4_dequant", "scale", scale, (torch.uint8,))
    checks.require_out_dtype("mxfp4_dequant", "dtype", dtype)
    checks.require_multiple("mxfp4_dequant", "packed", packed, MX_BLOCK // 2)
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // MX_BLOCK)
    checks.require_shape("mxfp4_dequant", "scale", scale, expected, "packed has one scale per 16 bytes")
    return mxfp4_dequant_reference(packed, scale, dtype)


def mxfp4_fake_quant(x: torch.Tensor) -> torch.Tensor:
    """Quantise to MXFP4 and back: ``mxfp4_dequant(*mxfp4_quant(x), x.dtype)``.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 32, any strides.

    Returns:
        [..., K], dtype of ``x``, a new tensor; a block with NaN or infinity becomes NaN.

    Raises:
        ShapeError: K is not a multiple of 32.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 32 values only.
    Source: REF-K fp4_act_quant, block 32; MXFP4_fake in the specification, section 2.7.
    """
    checks.require_activation("mxfp4_fake_quant", "x", x)
    checks.require_multiple("mxfp4_fake_quant", "x", x, MX_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.mxfp4_quant.triton_kernel import mxfp4_fake_quant_triton

        return mxfp4_fake_quant_triton(x)
    return mxfp4_fake_quant_reference(x)
