"""Bounded replay in the plain model: every row is computed, window floors hide what may not be seen (mode ``mask``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_plugin.reference.model import ReferenceModel
from deepinfer_plugin.replay.window import Chunk, ReplayRule, pieces


def run_replayed(
    model: ReferenceModel, tokens: torch.Tensor, num_prompt: int, rule: ReplayRule, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Logits of every row of a request under ``rule``, without a prefix hit.

    Args:
        model: the oracle.
        tokens: [num_tokens] prompt, then generated tokens.
        num_prompt: tokens of the prompt.
        rule: floors and borders; a rule that replays at hits has none to replay here.
        sizes: how the tokens are cut into calls; None: one call.

    Returns:
        [num_tokens, vocab_size] fp32. Rows of the prompt before the decoder's floor are no result of any engine.
    """
    cache = model.new_cache(tokens.shape[0])
    cache.decoder_floor = rule.decoder_floor(num_prompt)
    rows = []
    for size in sizes or [tokens.shape[0]]:
        start = cache.length
        for piece in pieces(Chunk(start=start, stop=start + size, num_prompt=num_prompt), rule):
            if piece.start < piece.first:
                model.replay_windows(cache, piece.start)
            rows.append(model.forward(tokens[piece.first : piece.stop], cache))
    return torch.cat(rows)


def run_bounded_hit(
    model: ReferenceModel, tokens: torch.Tensor, num_prompt: int, keep_tokens: int, hit: int
) -> torch.Tensor:
    """Logits of the rows from ``max(hit - window, 0)`` on, after a bounded hit of ``hit`` tokens.

    The entries of the hit come from an exact run; its last window is computed again with a floor. Decoder rows may lie
    inside the hit.

    Returns:
        [num_tokens - max(hit - window, 0), vocab_size] fp32.
    """
    start = max(hit - model.config.sliding_window, 0)
    cache = model.new_cache(tokens.shape[0])
    if hit > 0:
        model.forward(tokens[:hit], cache)
        cache.rewind(start)
    cache.decoder_floor = max(0, num_prompt - keep_tokens)
    rows = [model.forward(tokens[start:num_prompt], cache, encoder_floor=start, entries_from=hit)]
    rows += [model.forward(tokens[i : i + 1], cache) for i in range(num_prompt, tokens.shape[0])]
    return torch.cat(rows)
