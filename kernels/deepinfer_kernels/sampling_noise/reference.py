"""Philox4x32-10 in int64 tensors, and Gumbel noise from it."""

import torch

from deepinfer_kernels.elementary import log_positive

WORDS_PER_CALL = 4
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(
    num_rows: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds and hashes of all 64 bits, and positions: seeds, prompt_hashes, positions."""
    wide = torch.randint(-(1 << 63), (1 << 63) - 1, (2, num_rows), generator=generator)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    return wide[0].to(device), wide[1].to(device), positions.to(device)


def _product_halves(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of two 32-bit numbers; int64 wraps, and its 64 bits are the right ones."""
    product = word * multiplier
    return (product >> 32).bitwise_and_(_MASK), product.bitwise_and_(_MASK)


def philox4x32_10(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox on int64 tensors that hold 32-bit words and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(_ROUNDS):
        if index > 0:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        high0, low0 = _product_halves(_MULTIPLIERS[0], c0)
        high1, low1 = _product_halves(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def random_words_reference(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """``random_words`` on checked arguments."""
    num_rows, num_groups = seeds.shape[0], -(-vocab_size // WORDS_PER_CALL)
    if num_rows == 0 or vocab_size == 0:
        return torch.zeros((num_rows, vocab_size), dtype=torch.int64, device=seeds.device)
    group = torch.arange(num_groups, device=seeds.device)[None, :]
    seed, prompt = seeds[:, None], prompt_hashes[:, None]
    counter = (group, positions[:, None] & _MASK, prompt & _MASK, (prompt >> 32) & _MASK)
    words = philox4x32_10(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(words, dim=2).view(num_rows, -1)[:, :vocab_size]


def gumbel_noise_reference(
    seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """``gumbel_noise`` on checked arguments."""
    words = random_words_reference(seeds, prompt_hashes, positions, vocab_size).contiguous()
    uniform = (words.double() + 0.5) * 2.0**-32
    return -log_positive(-log_positive(uniform))
