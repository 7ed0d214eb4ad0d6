"""Pointwise functions whose value does not depend on where the element lies in memory.

On CPU torch.sigmoid, silu and softplus evaluate the last elements of a buffer, the ones that do not fill a vector
register, with another routine than the rest, so a row changes its bits with the number of rows. torch.exp, log1p,
erf, sin and cos were measured not to, and arithmetic is IEEE everywhere; these functions use nothing else.
"""

import torch

_HALF_SQRT = 0.5**0.5
_SOFTPLUS_LINEAR_FROM = 20.0  # torch's threshold: beyond it softplus(x) is x


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of an fp32 tensor, new tensor, same shape."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of an fp32 tensor, new tensor, same shape."""
    return x / torch.exp(-x).add_(1.0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + erf(x / sqrt(2))) / 2 of an fp32 tensor, new tensor, same shape."""
    return torch.erf(x * _HALF_SQRT).add_(1.0).mul_(0.5).mul_(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of an fp32 tensor, x itself above 20, new tensor, same shape."""
    return torch.where(x > _SOFTPLUS_LINEAR_FROM, x, torch.exp(x).log1p_())
