"""How much probability lies at or below the token of a row."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.restrict_logits.reference import MAX_VOCABULARY
from deepinfer_kernels.sum_smaller_probs.reference import sum_smaller_probs_reference
from deepinfer_kernels.sum_smaller_probs.triton_kernel import sum_smaller_probs_triton

__all__ = ["sum_smaller_probs"]


def sum_smaller_probs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Probability of each row's token, of all less likely ones, and of equally likely ones of a lower id.

    A token weighs floor(2^42 exp(logit - largest logit)), an integer, so that sums are exact and have no order.

    Args:
        logits: [num_rows, vocab_size] fp32; NaN counts as -inf.
        token_ids: [num_rows] int64.

    Returns:
        [num_rows] fp32, from 0 to 1; 0 for a row of nothing but -inf and NaN.

    Raises:
        ShapeError: arguments that do not fit each other, or a vocabulary whose weights could overflow.
        UnsupportedError: a wrong dtype.

    Invariance: bitwise per row, and the same on any device: exp is that of ``elementary``.
    Source: spec section 4.8.
    """
    op = "sum_smaller_probs"
    checks.require_rank(op, "logits", logits, 2, "one row per token")
    checks.require_dtype(op, "logits", logits, (torch.float32,))
    checks.require_dtype(op, "token_ids", token_ids, (torch.int64,))
    checks.require_shape(op, "token_ids", token_ids, logits.shape[:1], "pass one token per row of logits")
    if logits.shape[1] > MAX_VOCABULARY:
        raise ShapeError(
            f"{op}: logits has {logits.shape[1]} columns, expected at most {MAX_VOCABULARY}; "
            "the sum of more weights would not fit 63 bits"
        )
    if use_triton(logits):
        return sum_smaller_probs_triton(logits, token_ids)
    return sum_smaller_probs_reference(logits, token_ids)
