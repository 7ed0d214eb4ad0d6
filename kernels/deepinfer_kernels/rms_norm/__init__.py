"""RMSNorm over the last axis."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import UnsupportedError
from deepinfer_kernels.rms_norm.reference import rms_norm_reference
from deepinfer_kernels.rms_norm.triton_kernel import rms_norm_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square, then multiply by ``weight``.

    Args:
        x: [..., hidden_size], bf16 or fp32, any strides.
        weight: [hidden_size], bf16 or fp32.
        eps: added to the mean square; > 0. The text model uses 1e-20, vision 1e-6.

    Returns:
        [..., hidden_size], dtype of ``x``, a new tensor; computed in fp32, rounded once.

    Raises:
        ShapeError: ``weight`` does not fit ``x``.
        UnsupportedError: a dtype is neither bf16 nor fp32, or ``eps`` is not positive.

    Invariance: bitwise per row; a row depends on that row, ``weight`` and ``eps`` only.
    Source: REF, class RMSNorm.
    """
    checks.require_activation("rms_norm", "x", x)
    checks.require_activation("rms_norm", "weight", weight)
    checks.require_shape("rms_norm", "weight", weight, x.shape[-1:], "one value per element of the last axis of x")
    if not eps > 0:
        raise UnsupportedError(f"rms_norm: eps is {eps}, expected > 0; a row of zeros would become NaN")
    if use_triton(x):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
