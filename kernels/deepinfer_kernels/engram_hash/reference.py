"""The Engram hash in plain PyTorch: integers only, so every implementation is exact."""

import torch


def engram_rows_reference(
    compressed_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Hash arguments ``engram_rows`` has already checked; see there."""
    max_ngram = compressed_ids.shape[1]
    products = compressed_ids * multipliers  # [T, max_ngram], below 2**63 by the choice of the multipliers
    mixed = [products[:, 0]]
    for distance in range(1, max_ngram):
        mixed.append(mixed[-1] ^ products[:, distance])
    orders = torch.stack(mixed[1:], dim=1)  # [T, max_ngram - 1]
    rows = orders[:, :, None] % primes.view(max_ngram - 1, -1) + offsets.view(max_ngram - 1, -1)
    return rows.flatten(1).to(torch.int32)


def make_inputs(
    num_tokens: int, compressed_vocab_size: int, max_ngram: int, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Random compressed ids [num_tokens, max_ngram] int64."""
    ids = torch.randint(0, compressed_vocab_size, (num_tokens, max_ngram), generator=generator, dtype=torch.int64)
    return ids.to(device)
