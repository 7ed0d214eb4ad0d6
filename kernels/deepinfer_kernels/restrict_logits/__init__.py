"""Restrict the tokens that a row may become: min-p, top-k and top-p."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.restrict_logits.reference import MAX_VOCABULARY, restrict_logits_reference
from deepinfer_kernels.restrict_logits.triton_kernel import restrict_logits_triton

__all__ = ["restrict_logits"]


def restrict_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what min-p, top-k and top-p leave out; what stays keeps its bits.

    Tokens are ranked by (logit descending, id ascending), a total order: a tie at a border keeps the lower ids. A token
    weighs floor(2^42 exp(logit - largest logit)), an integer, so that sums are exact and have no order. Of the ranked
    tokens a row keeps the first ones, and at least one:

    1. min-p: those whose exp(logit - largest logit) is at least ``min_p``;
    2. top-k: at most ``top_k`` of these;
    3. top-p: of these, each one before which the weights sum to less than ``top_p`` of their total.

    Args:
        logits: [num_rows, vocab_size] fp32, already divided by the temperature; last axis contiguous, V < 2^20.
        top_k: [num_rows] int32 or int64; below 1 or from ``vocab_size`` on: no restriction.
        top_p: [num_rows] fp32; 1 or more: no restriction.
        min_p: [num_rows] fp32; 0 or less: no restriction.

    Returns:
        [num_rows, vocab_size] fp32, a new tensor. A row without any restriction keeps every bit. In a restricted row
        NaN counts as -inf, and is left out; a row of nothing but -inf and NaN becomes all -inf.

    Raises:
        ShapeError: arguments that do not fit each other, or a vocabulary whose weights could overflow.
        UnsupportedError: a wrong dtype.

    Invariance: bitwise per row, and the same on any device: exp is that of ``elementary``.
    Source: spec section 10.2, row 27.
    """
    op = "restrict_logits"
    checks.require_rank(op, "logits", logits, 2, "one row per token to sample")
    checks.require_dtype(op, "logits", logits, (torch.float32,))
    checks.require_dtype(op, "top_k", top_k, (torch.int32, torch.int64))
    for name, values in (("top_p", top_p), ("min_p", min_p)):
        checks.require_dtype(op, name, values, (torch.float32,))
    for name, values in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        checks.require_shape(op, name, values, logits.shape[:1], "pass one value per row of logits")
    if logits.shape[1] > MAX_VOCABULARY:
        raise ShapeError(
            f"{op}: logits has {logits.shape[1]} columns, expected at most {MAX_VOCABULARY}; "
            "the sum of more weights would not fit 63 bits"
        )
    if use_triton(logits):
        return restrict_logits_triton(logits, top_k, top_p, min_p)
    return restrict_logits_reference(logits, top_k, top_p, min_p)
