"""Draw one token for every row: the largest logit, or the largest after Gumbel noise. List the best tokens of a row."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.sample_tokens.reference import sample_tokens_reference, top_tokens_reference
from deepinfer_kernels.sample_tokens.top_tokens_kernel import top_tokens_triton
from deepinfer_kernels.sample_tokens.triton_kernel import sample_tokens_triton

__all__ = ["sample_tokens", "top_tokens"]


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    prompt_hashes: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The token of each row; a tie goes to the lower id.

    Temperature 0 takes the largest logit. Otherwise the largest logit / temperature + noise wins, with the noise of
    ``gumbel_noise``, which makes it a draw from softmax(logits / temperature). The quotient is fp32, the sum fp64.

    Args:
        logits: [num_rows, vocab_size] fp32, V >= 1; NaN and -inf are never drawn.
        temperature: [num_rows] fp32, >= 0.
        seeds: [num_rows] int64, the bits of the seed modulo 2^64.
        prompt_hashes: [num_rows] int64, the bits of a 64-bit hash of the prompt's token ids.
        positions: [num_rows] int64, absolute position of the token to sample.

    Returns:
        [num_rows] int64. A row without any finite or +inf logit gives 0.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: a wrong dtype.

    Invariance: exact per row, on any device; a row depends on that row's five arguments only.
    """
    op = "sample_tokens"
    checks.require_rank(op, "logits", logits, 2, "one row per token to sample")
    checks.require_dtype(op, "logits", logits, (torch.float32,))
    checks.require_dtype(op, "temperature", temperature, (torch.float32,))
    for name, values in (("seeds", seeds), ("prompt_hashes", prompt_hashes), ("positions", positions)):
        checks.require_dtype(op, name, values, (torch.int64,))
    for name, values in (
        ("temperature", temperature),
        ("seeds", seeds),
        ("prompt_hashes", prompt_hashes),
        ("positions", positions),
    ):
        checks.require_shape(op, name, values, logits.shape[:1], "pass one value per row of logits")
    if use_triton(logits):
        return sample_tokens_triton(logits, temperature, seeds, prompt_hashes, positions)
    return sample_tokens_reference(logits, temperature, seeds, prompt_hashes, positions)


def top_tokens(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The best tokens of each row by (logit descending, id ascending), best first.

    Args:
        logits: [num_rows, vocab_size] fp32; NaN counts as -inf, -0 equals 0.
        num_tokens: how many, at most ``vocab_size``.

    Returns:
        [num_rows, num_tokens] int64 token ids.

    Raises:
        ShapeError: ``logits`` is not a matrix, or has too few columns.
        UnsupportedError: ``logits`` is not fp32.

    Invariance: exact per row; the order is total, so a longer list begins with the shorter one.
    """
    op = "top_tokens"
    checks.require_rank(op, "logits", logits, 2, "one row per token")
    checks.require_dtype(op, "logits", logits, (torch.float32,))
    if not 0 <= num_tokens <= logits.shape[1]:
        raise ShapeError(
            f"{op}: num_tokens is {num_tokens}, expected 0 to {logits.shape[1]}, the columns of logits; ask for fewer"
        )
    if use_triton(logits):
        return top_tokens_triton(logits, num_tokens)
    return top_tokens_reference(logits, num_tokens)
