"""Markov and confidence head on a block: one draft after the other, and temperatures of confidences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from deepinfer_plugin.draft.heads import MAX_SCORE, DraftHeads, Drafts

VOCABULARY, WIDTH, RANK, NUM_REQS, NUM_DRAFTS = 96, 64, 32, 4, 3


class _Greedy:
    """Takes the largest logit and keeps what it saw."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del slots
        self.logits.append(logits)
        self.positions.append(positions)
        return logits.argmax(dim=1)


def _heads(temperatures: tuple[float, ...]) -> DraftHeads:
    config = SimpleNamespace(
        vocab_size=VOCABULARY, hidden_size=WIDTH, dspark_markov_rank=RANK, rms_norm_eps=1e-20, num_hidden_layers=1
    )
    last = nn.Module()
    heads = DraftHeads(cast("Any", config), last, torch.float32, temperatures)
    generator = torch.Generator().manual_seed(0)
    for parameter in last.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return heads


def _draft(heads: DraftHeads, draws: _Greedy) -> tuple[Drafts, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(NUM_REQS, NUM_DRAFTS, VOCABULARY, generator=generator)
    hidden = torch.randn(NUM_REQS, NUM_DRAFTS, WIDTH, generator=generator)
    positions = torch.arange(NUM_REQS * NUM_DRAFTS).view(NUM_REQS, NUM_DRAFTS)
    anchors = torch.tensor([1, 2, 3, 4])
    return heads.draft(base, hidden, anchors, torch.arange(NUM_REQS), positions, cast("Any", draws)), base, hidden


def test_every_draft_stands_behind_the_one_before_it() -> None:
    heads, draws = _heads((1.0,)), _Greedy()
    drafts, base, _ = _draft(heads, draws)
    previous = torch.tensor([1, 2, 3, 4])
    for place in range(NUM_DRAFTS):
        embedded = heads.markov.embed.weight[previous].float()
        expected = base[:, place] + embedded @ heads.markov.head.weight.float().t()
        torch.testing.assert_close(draws.logits[place], expected, rtol=1e-5, atol=1e-4)
        previous = drafts.tokens[:, place]
        assert previous.tolist() == draws.logits[place].argmax(dim=1).tolist()
        assert draws.positions[place].tolist() == [place + NUM_DRAFTS * request for request in range(NUM_REQS)]


@pytest.mark.parametrize("temperatures", [(1.0,), (0.5,), (1.0, 2.0, 1e-4)])
def test_a_confidence_is_the_sigmoid_of_its_score_over_its_temperature(temperatures: tuple[float, ...]) -> None:
    heads = _heads(temperatures)
    drafts, _, hidden = _draft(heads, _Greedy())
    previous = torch.tensor([1, 2, 3, 4])
    for place in range(NUM_DRAFTS):
        features = torch.cat((hidden[:, place], heads.markov.embed.weight[previous].float()), dim=1)
        score = features @ heads.confidence.proj.weight.float()[0] / temperatures[place % len(temperatures)]
        expected = torch.sigmoid(score.clamp(-MAX_SCORE, MAX_SCORE))
        torch.testing.assert_close(drafts.confidence[:, place], expected, rtol=1e-3, atol=1e-6)
        previous = drafts.tokens[:, place]
    assert bool(((drafts.confidence >= 0) & (drafts.confidence <= 1)).all())
