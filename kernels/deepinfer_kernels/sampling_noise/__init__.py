"""Random numbers as a function of (seed, prompt, position, token id): no state, no order."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.sampling_noise.reference import gumbel_noise_reference, philox4x32_10, random_words_reference
from deepinfer_kernels.sampling_noise.triton_kernel import gumbel_noise_triton, random_words_triton

__all__ = ["gumbel_noise", "philox4x32_10", "random_words"]


def random_words(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """One random 32-bit word for every row and token id, by Philox4x32-10.

    Layout, all words unsigned 32 bits: key = (low, high word of the seed); counter = (token id // 4, position, low,
    high word of the prompt's hash); the word of a token is output number token id % 4 of that call.

    Args:
        seeds: [num_rows] int64, the bits of the seed modulo 2^64.
        prompt_hashes: [num_rows] int64, the bits of a 64-bit hash of the prompt's token ids.
        positions: [num_rows] int64, absolute position of the token to sample, 0 to 2^32 - 1.
        vocab_size: number of token ids, from 0.

    Returns:
        [num_rows, vocab_size] int64, values 0 to 2^32 - 1.

    Raises:
        ShapeError: the vectors differ in length, or ``vocab_size`` is negative.
        UnsupportedError: a vector is not int64.

    Invariance: exact; an element depends on its row's three numbers and its column only.
    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11), and its code Random123.
    """
    _check("random_words", seeds, prompt_hashes, positions, vocab_size)
    if use_triton(seeds):
        return random_words_triton(seeds, prompt_hashes, positions, vocab_size)
    return random_words_reference(seeds, prompt_hashes, positions, vocab_size)


def gumbel_noise(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Standard Gumbel noise for every row and token id, from ``random_words``.

    A word w gives u = (w + 1/2) / 2^32, exact in fp64 and never 0 or 1, and -log(-log(u)) in fp64, with the logarithm
    of ``elementary``: 2^32 values from -3.13 to 22.87. A token whose logit lies more than 26 below another one is never
    drawn; its probability is at most 6e-12.

    Args:
        seeds: [num_rows] int64, the bits of the seed modulo 2^64.
        prompt_hashes: [num_rows] int64, the bits of a 64-bit hash of the prompt's token ids.
        positions: [num_rows] int64, absolute position of the token to sample, 0 to 2^32 - 1.
        vocab_size: number of token ids, from 0.

    Returns:
        [num_rows, vocab_size] fp64.

    Raises:
        ShapeError: the vectors differ in length, or ``vocab_size`` is negative.
        UnsupportedError: a vector is not int64.

    Invariance: bitwise; an element depends on its row's three numbers and its column only, on any device.
    """
    _check("gumbel_noise", seeds, prompt_hashes, positions, vocab_size)
    if use_triton(seeds):
        return gumbel_noise_triton(seeds, prompt_hashes, positions, vocab_size)
    return gumbel_noise_reference(seeds, prompt_hashes, positions, vocab_size)


def _check(op: str, seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> None:
    checks.require_rank(op, "seeds", seeds, 1, "one seed per row")
    for name, values in (("seeds", seeds), ("prompt_hashes", prompt_hashes), ("positions", positions)):
        checks.require_dtype(op, name, values, (torch.int64,))
        checks.require_shape(op, name, values, seeds.shape, "pass one value per row")
    if vocab_size < 0:
        raise ShapeError(f"{op}: vocab_size is {vocab_size}, expected at least 0; pass the number of token ids")
