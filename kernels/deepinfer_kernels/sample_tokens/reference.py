"""Greedy choice and Gumbel-max in plain PyTorch."""

import torch

from deepinfer_kernels.sampling_noise.reference import gumbel_noise_reference
from deepinfer_kernels.sampling_noise.reference import make_inputs as make_noise_inputs
from deepinfer_kernels.tiling import SAMPLING_ELEMENTS

_MINUS_INFINITY = -0x7F800001  # the ordered bits of -inf


def make_inputs(
    num_rows: int, vocab_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every third row greedy, logits with ties, NaN and -inf: the five arguments of ``sample_tokens``."""
    logits = torch.randint(-8, 9, (num_rows, vocab_size), generator=generator) / 4
    chance = torch.rand(num_rows, vocab_size, generator=generator)
    logits = torch.where(chance < 0.1, -torch.inf, torch.where(chance > 0.95, torch.nan, logits))
    temperature = torch.rand(num_rows, generator=generator) + 0.25
    temperature[::3] = 0.0
    temperature[1::3] = 1.0
    numbers = make_noise_inputs(num_rows, generator, device)
    return (logits.to(device), temperature.to(device), *numbers)


def sample_tokens_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    prompt_hashes: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """``sample_tokens`` on checked arguments, some rows at a time: noise of a whole batch would take gigabytes."""
    sampled = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[1] == 0:
        return sampled
    rows_at_once = -(-SAMPLING_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        sampled[rows] = _sample_rows(logits[rows], temperature[rows], seeds[rows], prompt_hashes[rows], positions[rows])
    return sampled


def _sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    prompt_hashes: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    is_greedy = (temperature == 0.0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, temperature[:, None])
    noise = gumbel_noise_reference(seeds, prompt_hashes, positions, vocab_size)
    score = scaled.double() + torch.where(is_greedy, 0.0, noise)
    score = torch.where(score.isnan(), -torch.inf, score)
    best = score.amax(dim=1, keepdim=True)
    # torch.argmax promises no order among equals; the least id that reaches the maximum does not depend on one
    ids = torch.arange(vocab_size, device=logits.device)
    return torch.where(score == best, ids, vocab_size - 1).amin(dim=1)


def top_tokens_reference(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """``top_tokens`` on checked arguments."""
    # One integer per token that orders as (logit, -id): all differ, so that any top-k algorithm gives one list.
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes both zeros equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ordered = ordered.masked_fill_(logits.isnan(), _MINUS_INFINITY)
    keys = (ordered << 32) + torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return torch.topk(keys, num_tokens, dim=1, sorted=True).indices
