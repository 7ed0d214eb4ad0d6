"""Pooling of token pairs in plain PyTorch."""

import torch


def make_inputs(
    lengths: list[int], starts: list[int], width: int, ring: int, generator: torch.Generator, device: str
) -> dict[str, torch.Tensor]:
    """Rows of ``len(lengths)`` requests, request i from position ``starts[i]`` on, and a random state cache.

    State blocks are handed out in descending order, so that a request and its block never share an index.
    """
    positions = torch.cat([torch.arange(s, s + n) for n, s in zip(lengths, starts, strict=True)])
    req_idx = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])
    num_blocks = len(lengths) + 1
    inputs = {
        "latent": torch.randn(len(positions), width, generator=generator),
        "score": 2 * torch.randn(len(positions), width, generator=generator),
        "positions": positions,
        "req_idx": req_idx,
        "state_cache": torch.randn(num_blocks, ring, 2 * width, generator=generator),
        "state_block": torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def compress_pairs_reference(
    latent: torch.Tensor,
    score: torch.Tensor,
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    state_cache: torch.Tensor,
    state_block: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``compress_pairs`` on checked arguments."""
    num_tokens, width = latent.shape
    ring = state_cache.shape[1]
    if num_tokens == 0:
        return latent.new_zeros((0, width), dtype=out_dtype)
    is_token = req_idx >= 0
    block = state_block.index_select(0, req_idx.clamp(min=0)).long()
    # The even token of each pair: the row before, or the row the request kept from an earlier call.
    follows = torch.zeros_like(is_token)
    follows[1:] = (req_idx[1:] == req_idx[:-1]) & (positions[1:] == positions[:-1] + 1)
    kept = state_cache[block, (positions - 1) % ring]  # [num_tokens, 2 * width]
    even_latent = torch.where(follows.unsqueeze(1), latent.roll(1, 0), kept[:, :width])
    even_score = torch.where(follows.unsqueeze(1), score.roll(1, 0), kept[:, width:])

    pooled = _pool(even_latent, even_score, latent, score)
    closes = is_token & (positions % 2 == 1)
    out = pooled.masked_fill_(~closes.unsqueeze(1), 0.0).to(out_dtype)

    # A row that the same request overwrites later in this call keeps out, so that no ring row is written twice.
    stays = is_token.clone()
    stays[: max(num_tokens - ring, 0)] &= req_idx[: max(num_tokens - ring, 0)] != req_idx[ring:]
    rows = stays.nonzero().squeeze(1)
    place = (block.index_select(0, rows), positions.index_select(0, rows) % ring)
    state_cache[place] = torch.cat([latent, score], dim=1).index_select(0, rows)
    return out


def _pool(
    even_latent: torch.Tensor, even_score: torch.Tensor, odd_latent: torch.Tensor, odd_score: torch.Tensor
) -> torch.Tensor:
    """Softmax over two scores per channel: weights are normalised first, the even token is added first."""
    largest = torch.maximum(even_score, odd_score)
    even_weight = (even_score - largest).exp_()
    odd_weight = (odd_score - largest).exp_()
    total = even_weight + odd_weight
    return even_weight / total * even_latent + odd_weight / total * odd_latent
