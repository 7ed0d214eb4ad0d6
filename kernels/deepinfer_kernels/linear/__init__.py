"""Linear layers without bias: bf16 or fp32 weights, MXFP8 weights, and the grouped output projection."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.linear.reference import (
    dequantize_blocks_reference,
    grouped_linear_reference,
    linear_reference,
    mxfp8_linear_reference,
)
from deepinfer_kernels.linear.weights import check_blocks, check_prepared


def linear(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype, num_shards: int = 1) -> torch.Tensor:
    """Multiply rows with the transpose of ``weight``.

    Args:
        x: [M, K] bf16 or fp32, any strides.
        weight: [N, K] bf16 or fp32.
        out_dtype: bf16 or fp32.
        num_shards: the weight is one of this many equal shares of a layer's outputs; a sum over K is cut as for all of
            them, so that shares side by side give the bits of the whole.

    Returns:
        [M, N] of ``out_dtype``; operands exact in fp32, accumulated in fp32, rounded once.

    Raises:
        ShapeError: ``weight`` does not fit ``x``.
        UnsupportedError: a dtype is neither bf16 nor fp32.

    Invariance: bitwise per row; a row depends on that row and ``weight`` only.
    Source: REF linear, unquantised weights.
    """
    checks.require_activation("linear", "x", x)
    checks.require_activation("linear", "weight", weight)
    checks.require_out_dtype("linear", "out_dtype", out_dtype)
    checks.require_rank("linear", "x", x, 2, "[M, K]")
    checks.require_rank("linear", "weight", weight, 2, "[N, K]")
    checks.require_shape("linear", "weight", weight, (weight.shape[0], x.shape[1]), "its columns are those of x")
    if use_triton(x):
        from deepinfer_kernels.linear.triton_kernel import linear_triton

        return linear_triton(x, weight, out_dtype, num_shards)
    return linear_reference(x, weight, out_dtype)


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of a weight with one power-of-two scale per 32 x 32 block; exact in bf16 and in fp32.

    Args:
        weight: [N, K] float8_e4m3fn, K a multiple of 32.
        scale: [ceil(N/32), K/32] uint8, exponent + 127; 255 is NaN.
        dtype: bf16 or fp32.

    Returns:
        [N, K] of ``dtype``, a new tensor.

    Raises:
        ShapeError: ``scale`` does not fit ``weight``, or K is not a multiple of 32.
        UnsupportedError: a dtype is another one.

    Invariance: exact; an element depends on its code and scale only.
    Source: specification, section 5.2.
    """
    check_blocks("dequantize_blocks", weight, scale)
    checks.require_out_dtype("dequantize_blocks", "dtype", dtype)
    return dequantize_blocks_reference(weight, scale, dtype)


def mxfp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    quantize_input: bool,
    num_shards: int = 1,
) -> torch.Tensor:
    """Multiply rows with the transpose of an MXFP8 weight, the rows quantised to MXFP8 first if asked.

    Args:
        x: [M, K] bf16 or fp32, any strides; K a multiple of 32.
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N/32), K/32] uint8, exponent + 127, one per 32 x 32 block.
        out_dtype: bf16 or fp32.
        quantize_input: apply ``mxfp8_fake_quant`` to ``x``.
        num_shards: the weight is one of this many equal shares of a layer's outputs; a sum over K is cut as for all of
            them, so that shares side by side give the bits of the whole.

    Returns:
        [M, N] of ``out_dtype``; operands exact in fp32, accumulated in fp32, rounded once.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row; a row depends on that row and the weight only.
    Source: REF linear with fp8 weights; specification, section 2.8.
    """
    checks.require_activation("mxfp8_linear", "x", x)
    checks.require_out_dtype("mxfp8_linear", "out_dtype", out_dtype)
    checks.require_rank("mxfp8_linear", "x", x, 2, "[M, K]")
    check_blocks("mxfp8_linear", weight, scale)
    checks.require_shape("mxfp8_linear", "weight", weight, (weight.shape[0], x.shape[1]), "its columns are those of x")
    if use_triton(x):
        from deepinfer_kernels.linear.triton_kernel import mxfp8_linear_triton

        return mxfp8_linear_triton(x, weight, scale, out_dtype, quantize_input, num_shards)
    return mxfp8_linear_reference(x, weight, scale, out_dtype, quantize_input)


def mxfp8_prepared_linear(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype, num_shards: int = 1
) -> torch.Tensor:
    """``mxfp8_linear`` of rows that an operation before has prepared, and quantised where the mode asks for it.

    Args:
        rows: [M, ...] as ``hc_norm`` or ``latent_projections`` prepares them, from K columns.
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N/32), K/32] uint8, exponent + 127, one per 32 x 32 block.
        out_dtype: bf16 or fp32.
        num_shards: the weight is one of this many equal shares of a layer's outputs; a sum over K is cut as for all of
            them, so that shares side by side give the bits of the whole.

    Returns:
        [M, N] of ``out_dtype``; operands exact in fp32, accumulated in fp32, rounded once.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row; a row depends on that row and the weight only.
    Source: REF linear with fp8 weights; specification, section 2.8.
    """
    checks.require_out_dtype("mxfp8_prepared_linear", "out_dtype", out_dtype)
    check_prepared("mxfp8_prepared_linear", rows, (weight, scale))
    if use_triton(rows):
        from deepinfer_kernels.linear.triton_kernel import mxfp8_prepared_triton

        return mxfp8_prepared_triton(rows, weight, scale, out_dtype, num_shards)
    return mxfp8_linear_reference(rows, weight, scale, out_dtype, quantize_input=False)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype, num_shards: int = 1
) -> torch.Tensor:
    """Multiply every group of columns with its own block of an MXFP8 weight (wo_a); ``x`` is not quantised.

    Args:
        x: [M, G, K] bf16 or fp32, any strides; K a multiple of 32.
        weight: [G * N, K] float8_e4m3fn, the blocks of the groups one below the other.
        scale: [ceil(G * N / 32), K/32] uint8, exponent + 127, one per 32 x 32 block.
        out_dtype: bf16 or fp32.
        num_shards: the weight is one of this many equal shares of a layer's groups; a sum over K is cut as for all of
            them, so that shares side by side give the bits of the whole.

    Returns:
        [M, G, N] of ``out_dtype``; operands exact in fp32, accumulated in fp32, rounded once.

    Raises:
        ShapeError: the arguments do not fit each other.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per row; a row depends on that row and the weight only.
    Source: REF, wo_a in bf16; specification, section 2.8.
    """
    checks.require_activation("grouped_linear", "x", x)
    checks.require_out_dtype("grouped_linear", "out_dtype", out_dtype)
    checks.require_rank("grouped_linear", "x", x, 3, "[M, G, K]")
    check_blocks("grouped_linear", weight, scale)
    num_groups = x.shape[1]
    if num_groups == 0 or weight.shape[0] % num_groups != 0 or weight.shape[1] != x.shape[2]:
        raise ShapeError(
            f"grouped_linear: weight is {list(weight.shape)}, expected [a multiple of {num_groups}, {x.shape[2]}]; "
            f"x {list(x.shape)} has {num_groups} groups of {x.shape[2]} columns"
        )
    if use_triton(x):
        from deepinfer_kernels.linear.triton_kernel import grouped_linear_triton

        return grouped_linear_triton(x, weight, scale, out_dtype, num_shards)
    return grouped_linear_reference(x, weight, scale, out_dtype)
