"""MXFP8: e4m3 codes with one power-of-two scale (E8M0) per 32 values of the last axis."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.mxfp8_quant.reference import (
    mxfp8_dequant_reference,
    mxfp8_fake_quant_reference,
    mxfp8_quant_reference,
)
from deepinfer_kernels.tiling import MX_BLOCK


def mxfp8_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every 32 values of the last axis.

    The scale is 2^ceil(log2(max(amax, 1e-4) * fp32(1/448))), from the exponent bits of the fp32 product; the code is
    the e4m3 number nearest to x / scale, ties to even, clamped to 448. A block with NaN or infinity becomes NaN.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 32, any strides.

    Returns:
        codes [..., K] float8_e4m3fn and scale [..., K/32] uint8 (exponent + 127), new tensors.

    Raises:
        ShapeError: K is not a multiple of 32.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 32 values only.
    Source: REF-K act_quant.
    """
    checks.require_activation("mxfp8_quant", "x", x)
    checks.require_multiple("mxfp8_quant", "x", x, MX_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.mxfp8_quant.triton_kernel import mxfp8_quant_triton

        return mxfp8_quant_triton(x)
    return mxfp8_quant_reference(x)


def mxfp8_dequant(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of MXFP8 codes; exact in bf16 and in fp32.

    Args:
        codes: [..., K] float8_e4m3fn.
        scale: [..., K/32] uint8, exponent + 127; 255 is NaN.
        dtype: bf16 or fp32.

    Returns:
        [..., K] of ``dtype``, a new tensor.

    Raises:
        ShapeError: K is not a multiple of 32, or ``scale`` does not fit ``codes``.
        UnsupportedError: a dtype is another one.

    Invariance: exact; an element depends on its code and scale only.
    Source: specification, section 5.2.
    """
    checks.require_dtype("mxfp8_dequant", "codes", codes, (torch.float8_e4m3fn,))
    checks.require_dtype("mxfp8_dequant", "scale", scale, (torch.uint8,))
    checks.require_out_dtype("mxfp8_dequant", "dtype", dtype)
    checks.require_multiple("mxfp8_dequant", "codes", codes, MX_BLOCK)
    expected = (*codes.shape[:-1], codes.shape[-1] // MX_BLOCK)
    checks.require_shape("mxfp8_dequant", "scale", scale, expected, "codes have one scale per 32 values")
    return mxfp8_dequant_reference(codes, scale, dtype)


def mxfp8_fake_quant(x: torch.Tensor) -> torch.Tensor:
    """Quantise to MXFP8 and back: ``mxfp8_dequant(*mxfp8_quant(x), x.dtype)``.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 32, any strides.

    Returns:
        [..., K], dtype of ``x``, a new tensor.

    Raises:
        ShapeError: K is not a multiple of 32.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 32 values only.
    Source: REF-K act_quant; MXFP8_fake in the specification, section 2.4.
    """
    checks.require_activation("mxfp8_fake_quant", "x", x)
    checks.require_multiple("mxfp8_fake_quant", "x", x, MX_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.mxfp8_quant.triton_kernel import mxfp8_fake_quant_triton

        return mxfp8_fake_quant_triton(x)
    return mxfp8_fake_quant_reference(x)
