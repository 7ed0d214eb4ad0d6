"""The restriction in plain PyTorch: rank, count how many stay, cut there."""

import torch

from deepinfer_kernels.elementary import exp_nonpositive
from deepinfer_kernels.tiling import SAMPLING_ELEMENTS

# Fraction bits of a weight. 2^42 steps resolve a probability of 2e-13 of the largest one; 2^20 weights fill 62 bits.
WEIGHT_BITS = 42
MAX_VOCABULARY = (1 << 20) - 1


def make_inputs(
    num_rows: int, vocab_size: int, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with many ties, both zeros and -inf, and every mixture of restrictions: logits, top_k, top_p, min_p."""
    logits = torch.randint(-24, 25, (num_rows, vocab_size), generator=generator) / 8
    logits = torch.where(torch.rand(num_rows, vocab_size, generator=generator) < 0.1, -torch.inf, logits)
    is_negative_zero = (logits == 0) & (torch.rand(num_rows, vocab_size, generator=generator) < 0.5)
    logits = torch.where(is_negative_zero, torch.tensor(-0.0), logits)
    top_k = torch.randint(0, vocab_size + 2, (num_rows,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(num_rows, generator=generator).clamp_min(1e-3)
    min_p = torch.rand(num_rows, generator=generator) / 4
    off = torch.rand(3, num_rows, generator=generator) < 0.4
    return (
        logits.to(device),
        torch.where(off[0], vocab_size, top_k).to(device),
        torch.where(off[1], 1.0, top_p).to(device),
        torch.where(off[2], 0.0, min_p).to(device),
    )


def restrict_logits_reference(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """``restrict_logits`` on checked arguments, some rows at a time to bound the memory."""
    restricted = logits.clone(memory_format=torch.contiguous_format)
    if logits.shape[1] == 0:
        return restricted
    rows_at_once = -(-SAMPLING_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        restricted[rows] = _restrict_rows(logits[rows], top_k[rows], top_p[rows], min_p[rows])
    return restricted


def _restrict_rows(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    vocab_size = logits.shape[1]
    has_top_k, has_top_p, has_min_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0, min_p > 0.0
    clean = torch.where(logits.isnan(), -torch.inf, logits)
    ranked, order = torch.sort(clean, dim=1, descending=True, stable=True)  # stable: the lower id first
    largest = ranked[:, :1]
    # where the largest logit is +inf the difference is NaN
    ratio = torch.where(ranked == largest, 1.0, exp_nonpositive(ranked - largest))

    reaches = (ratio >= min_p[:, None]).sum(dim=1)
    num_kept = torch.where(has_min_p, reaches, vocab_size)
    num_kept = torch.where(has_top_k, torch.minimum(num_kept, top_k.long()), num_kept)
    rank = torch.arange(vocab_size, device=logits.device)
    weight = (ratio * 2.0**WEIGHT_BITS).long().masked_fill_(rank >= num_kept[:, None], 0)
    through = weight.cumsum(dim=1)  # integers: exact in any order
    limit = (through[:, -1].double() * top_p.double()).ceil().long()  # before < p * total, in integers
    within = (through - weight < limit[:, None]).sum(dim=1)
    num_kept = torch.where(has_top_p, torch.minimum(num_kept, within), num_kept).clamp_min_(1)

    is_kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, rank < num_kept[:, None])
    is_restricted = has_top_k | has_top_p | has_min_p
    return torch.where(is_kept & ~logits.isnan(), logits, -torch.inf).where(is_restricted[:, None], logits)
