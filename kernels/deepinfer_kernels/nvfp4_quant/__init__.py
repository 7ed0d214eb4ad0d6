"""NVFP4: e2m1 codes, two to a byte, with one e4m3 scale per 16 values of the last axis."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.nvfp4_quant.reference import (
    nvfp4_dequant_reference,
    nvfp4_fake_quant_reference,
    nvfp4_quant_reference,
)
from deepinfer_kernels.tiling import NVFP4_BLOCK


def nvfp4_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every 16 values of the last axis.

    The scale is the e4m3 number nearest to max(amax, 6 * 2^-9) / 6, ties to even, at most 448; the code is the e2m1
    number nearest to x / scale (IEEE division), ties to the even code, saturating at 6.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 16, any strides.

    Returns:
        packed [..., K/2] uint8, even column in the low nibble, and scale [..., K/16] uint8 (the byte of an e4m3),
        new tensors. A block with NaN gets the scale NaN (0x7f).

    Raises:
        ShapeError: K is not a multiple of 16.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 16 values only.
    Source: REF-K fp4_act_quant, block 16 with e4m3 scales.
    """
    checks.require_activation("nvfp4_quant", "x", x)
    checks.require_multiple("nvfp4_quant", "x", x, NVFP4_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.nvfp4_quant.triton_kernel import nvfp4_quant_triton

        return nvfp4_quant_triton(x)
    return nvfp4_quant_reference(x)


def nvfp4_dequant(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of NVFP4 codes; exact in bf16 and in fp32.

    Args:
        packed: [..., K/2] uint8, even column in the low nibble.
        scale: [..., K/16] uint8, the byte of an e4m3.
        dtype: bf16 or fp32.

    Returns:
        [..., K] of ``dtype``, a new tensor.

    Raises:
        ShapeError: K is not a multiple of 16, or ``scale`` does not fit ``packed``.
        UnsupportedError: a dtype is another one.

    Invariance: exact; an element depends on its code and scale only.
    Source: specification, sections 2.6 and 6.1.
    """
    checks.require_dtype("nvfp4_dequant", "packed", packed, (torch.uint8,))
    checks.require_dtype("nvfp4_dequant", "scale", scale, (torch.uint8,))
    checks.require_out_dtype("nvfp4_dequant", "dtype", dtype)
    checks.require_multiple("nvfp4_dequant", "packed", packed, NVFP4_BLOCK // 2)
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // NVFP4_BLOCK)
    checks.require_shape("nvfp4_dequant", "scale", scale, expected, "packed has one scale per 8 bytes")
    return nvfp4_dequant_reference(packed, scale, dtype)


def nvfp4_fake_quant(x: torch.Tensor) -> torch.Tensor:
    """Quantise to NVFP4 and back: ``nvfp4_dequant(*nvfp4_quant(x), x.dtype)``.

    Not idempotent: where the scale is a subnormal e4m3, a second application can give other values.

    Args:
        x: [..., K] bf16 or fp32, K a multiple of 16, any strides.

    Returns:
        [..., K], dtype of ``x``, a new tensor; a block with NaN becomes NaN.

    Raises:
        ShapeError: K is not a multiple of 16.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: exact; a block depends on its 16 values only.
    Source: REF-K fp4_act_quant; NVFP4_fake in the specification, section 2.6.
    """
    checks.require_activation("nvfp4_fake_quant", "x", x)
    checks.require_multiple("nvfp4_fake_quant", "x", x, NVFP4_BLOCK)
    if use_triton(x):
        from deepinfer_kernels.nvfp4_quant.triton_kernel import nvfp4_fake_quant_triton

        return nvfp4_fake_quant_triton(x)
    return nvfp4_fake_quant_reference(x)
