"""Rotary position embedding on the last dimensions of a vector, with plain or YaRN frequencies."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.rope.reference import (
    YarnScaling,
    cos_sin_reference,
    inverse_frequencies_reference,
    rope_reference,
)
from deepinfer_kernels.rope.triton_kernel import rope_triton

__all__ = ["YarnScaling", "cos_sin", "inverse_frequencies", "rope"]


def inverse_frequencies(rotary_dim: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    """Angle per position of every pair, in radians.

    Args:
        rotary_dim: number of rotated dimensions R, even.
        theta: base, > 1.
        yarn: scaling of long contexts, or None for theta^(-2k/R).

    Returns:
        [R/2] fp32 on the CPU.

    Raises:
        UnsupportedError: ``rotary_dim`` is odd or not positive, or ``theta`` is not above 1.

    Invariance: depends on the arguments only.
    Source: REF precompute_freqs_cis; specification, section 2.3.
    """
    if rotary_dim <= 0 or rotary_dim % 2 != 0:
        raise UnsupportedError(
            f"inverse_frequencies: rotary_dim is {rotary_dim}, expected a positive even number; pairs are rotated"
        )
    if not theta > 1:
        raise UnsupportedError(f"inverse_frequencies: theta is {theta}, expected > 1; correct rope_theta")
    return inverse_frequencies_reference(rotary_dim, theta, yarn)


def cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of ``positions * inv_freq``, the product rounded to fp32.

    Args:
        positions: [T] int64, absolute, below 2^24.
        inv_freq: [R/2] fp32 on the device of ``positions``.

    Returns:
        cos and sin, both [T, R/2] fp32.

    Raises:
        ShapeError: an argument has not exactly one axis.
        UnsupportedError: an argument has another dtype.

    Invariance: bitwise per position.
    Source: REF precompute_freqs_cis.
    """
    checks.require_rank("cos_sin", "positions", positions, 1, "[T]")
    checks.require_dtype("cos_sin", "positions", positions, (torch.int64,))
    checks.require_rank("cos_sin", "inv_freq", inv_freq, 1, "[R/2]")
    checks.require_dtype("cos_sin", "inv_freq", inv_freq, (torch.float32,))
    return cos_sin_reference(positions, inv_freq)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last R dimensions, adjacent pairs (x[2k], x[2k+1]) by the angle k of the row.

    Args:
        x: [T, ..., D] bf16 or fp32, D >= R, any strides.
        cos: [T, R/2] fp32, one row per index of the first axis of ``x``.
        sin: as ``cos``.
        inverse: rotate back (the conjugate rotation).

    Returns:
        Shape and dtype of ``x``, a new contiguous tensor; products and sum in fp32, rounded once. The first D - R
        dimensions are copied.

    Raises:
        ShapeError: the tables do not fit each other or ``x``.
        UnsupportedError: a dtype is another one.

    Invariance: bitwise per vector; it depends on that vector and its row of the tables only.
    Source: REF apply_rotary_emb.
    """
    checks.require_activation("rope", "x", x)
    checks.require_dtype("rope", "cos", cos, (torch.float32,))
    checks.require_dtype("rope", "sin", sin, (torch.float32,))
    checks.require_rank("rope", "cos", cos, 2, "[T, R/2]")
    checks.require_shape("rope", "sin", sin, cos.shape, "sin has the shape of cos")
    if x.dim() < 2 or x.shape[0] != cos.shape[0] or x.shape[-1] < 2 * cos.shape[1]:
        raise ShapeError(
            f"rope: x is {list(x.shape)}, expected [{cos.shape[0]}, ..., at least {2 * cos.shape[1]}]; "
            f"the tables {list(cos.shape)} have one row per row of x and one column per pair"
        )
    if use_triton(x) and x.shape[-1] % 2 == 0:
        return rope_triton(x, cos, sin, inverse)
    return rope_reference(x, cos, sin, inverse)
