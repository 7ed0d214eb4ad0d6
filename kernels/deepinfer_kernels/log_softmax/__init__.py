"""Log-probabilities of whole rows, of chosen tokens, and the normaliser alone."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.log_softmax.reference import (
    log_softmax_reference,
    log_sum_exp_reference,
    token_log_softmax_reference,
)
from deepinfer_kernels.log_softmax.triton_kernel import log_softmax_triton, log_sum_exp_triton, token_log_softmax_triton

__all__ = ["log_softmax", "log_sum_exp", "token_log_softmax"]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the softmax of each row.

    An element is (logit - m) - log(s), where m is the row's largest logit and s the sum of exp(logit - m), taken chunk
    by chunk: with the largest logit m_c of a chunk of LOGSUM_CHUNK columns, lane j of LOGSUM_BLOCK lanes adds
    exp(logit - m_c) of its columns j, j + LOGSUM_BLOCK, ... in this order, and the lanes are halved, the upper half
    added to the lower, until one is left. The sums of the chunks, times exp(m_c - m), are halved likewise, zeros
    standing for what lacks to a power of two. Everything is fp32.

    Args:
        logits: [num_rows, vocab_size] fp32, any strides.

    Returns:
        [num_rows, vocab_size] fp32, a new tensor. -inf gives -inf, also in a row of nothing else; a row with NaN or
        +inf is NaN wherever it is not -inf.

    Raises:
        ShapeError: ``logits`` is not a matrix.
        UnsupportedError: ``logits`` is not fp32.

    Invariance: bitwise per row; a row depends on its values only, not on its strides or the other rows.
    Source: spec section 10.2, row 28.
    """
    _check("log_softmax", logits)
    if use_triton(logits):
        return log_softmax_triton(logits)
    return log_softmax_reference(logits)


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of the sum of exp over each row, m + log(s) in the notation and order of ``log_softmax``.

    Args:
        logits: [num_rows, vocab_size] fp32, any strides.

    Returns:
        [num_rows] fp32; -inf for a row of nothing but -inf, NaN for one with NaN or +inf.

    Raises:
        ShapeError: ``logits`` is not a matrix.
        UnsupportedError: ``logits`` is not fp32.

    Invariance: bitwise per row.
    """
    _check("log_sum_exp", logits)
    if use_triton(logits):
        return log_sum_exp_triton(logits)
    return log_sum_exp_reference(logits)


def token_log_softmax(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The elements of ``log_softmax`` at some columns, bit for bit, without the whole matrix.

    Args:
        logits: [num_rows, vocab_size] fp32, any strides.
        token_ids: [num_rows, num_ids] int64, each in 0 .. vocab_size - 1.

    Returns:
        [num_rows, num_ids] fp32.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: a wrong dtype.

    Invariance: bitwise per element; it depends on its row and its id only, not on how many ids are asked for.
    """
    op = "token_log_softmax"
    _check(op, logits)
    checks.require_rank(op, "token_ids", token_ids, 2, "a list of ids for every row")
    checks.require_dtype(op, "token_ids", token_ids, (torch.int64,))
    checks.require_shape(
        op, "token_ids", token_ids, (logits.shape[0], token_ids.shape[1]), "pass one list per row of logits"
    )
    if use_triton(logits):
        return token_log_softmax_triton(logits, token_ids)
    return token_log_softmax_reference(logits, token_ids)


def _check(op: str, logits: torch.Tensor) -> None:
    checks.require_rank(op, "logits", logits, 2, "one row per token")
    checks.require_dtype(op, "logits", logits, (torch.float32,))
