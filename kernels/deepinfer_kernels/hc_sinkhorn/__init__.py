"""Mix coefficients of the manifold hyper-connections (mHC): two gates, and a nearly doubly stochastic matrix."""

from math import isqrt

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_sinkhorn.reference import hc_sinkhorn_reference
from deepinfer_kernels.hc_sinkhorn.triton_kernel import hc_sinkhorn_triton


def hc_sinkhorn(
    mix_logits: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, iters: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn mix logits into pre, post and comb.

    pre = sigmoid(.) + eps, post = 2 * sigmoid(.), comb = softmax over the destination + eps, then a column step, then
    ``iters - 1`` rounds of a row and a column step; a step divides by the sum + eps.

    Args:
        mix_logits: [T, (2 + S) * S] fp32 from ``hc_mix``.
        scale: [3] fp32, factors of the logits of pre, post and comb.
        base: [(2 + S) * S] fp32, added after the factor.
        iters: column steps, >= 1; 20 in the model.
        eps: hc_eps of the model, 1e-6.

    Returns:
        pre [T, S], post [T, S] and comb [T, S, S] (source stream, destination stream), all fp32.

    Raises:
        ShapeError: the arguments do not fit each other, or the width is not (2 + S) * S for any S.
        UnsupportedError: a dtype is not fp32, or ``iters`` is below 1.

    Invariance: bitwise per token; sums are serial in ascending stream, division rounds to the nearest (on a GPU for
    quotients above 2^-100).
    Source: REF-K hc_split_sinkhorn; specification, section 2.2.
    """
    for name, tensor in (("mix_logits", mix_logits), ("scale", scale), ("base", base)):
        checks.require_dtype("hc_sinkhorn", name, tensor, (torch.float32,))
    checks.require_rank("hc_sinkhorn", "mix_logits", mix_logits, 2, "[T, (2 + S) * S]")
    width = mix_logits.shape[1]
    num_streams = isqrt(width + 1) - 1
    if num_streams < 1 or (2 + num_streams) * num_streams != width:
        raise ShapeError(
            f"hc_sinkhorn: mix_logits is {list(mix_logits.shape)}, expected a width of (2 + S) * S, as 24 for S = 4; "
            "pass the result of hc_mix"
        )
    checks.require_shape("hc_sinkhorn", "scale", scale, (3,), "one factor each for pre, post and comb")
    checks.require_shape("hc_sinkhorn", "base", base, (width,), "one value per mix logit")
    if iters < 1:
        raise UnsupportedError(f"hc_sinkhorn: iters is {iters}, expected >= 1; correct hc_sinkhorn_iters")
    if use_triton(mix_logits):
        return hc_sinkhorn_triton(mix_logits, scale, base, num_streams, iters, eps)
    return hc_sinkhorn_reference(mix_logits, scale, base, num_streams, iters, eps)
