"""What turns the rows of a draft block into tokens, one after the other, and says how likely each will be accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_plugin.draft.draws import Draws
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.linear import Embedding, PlainLinear, RMSNorm

MAX_SCORE = 60.0
"""Bound of a confidence's logit: exp of it is finite in fp32. Source: DI, tl/dflash.py."""


class MarkovHead(nn.Module):
    """Adds to the logits of a token what its predecessor says: a low-rank matrix of vocab_size x vocab_size."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, rank)
        self.head = PlainLinear(vocab_size, rank)


class ConfidenceHead(nn.Module):
    """Scores a draft from the row that it comes from and the embedding of its predecessor.

    Attributes:
        temperatures: [1] or [num_drafts] fp32, divide the scores.
    """

    temperatures: torch.Tensor

    def __init__(self, width: int, temperatures: Sequence[float]) -> None:
        super().__init__()
        self.proj = PlainLinear(1, width)
        self.register_buffer("temperatures", torch.tensor(temperatures, dtype=torch.float32), persistent=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Of every request.

    tokens: [num_reqs, num_drafts] int64; confidence: [num_reqs, num_drafts] fp32, the chance of each draft to be
    accepted if all before it are.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor


class DraftHeads:
    """Norm, Markov and confidence head. The modules belong to the last draft block, whose names they carry."""

    def __init__(
        self, config: ModelConfig, last_block: nn.Module, activation_dtype: torch.dtype, temperatures: Sequence[float]
    ) -> None:
        """Make them without weights.

        Args:
            config: of the model.
            last_block: gets them as children.
            activation_dtype: of the rows.
            temperatures: one for all drafts of a block, or one for each.
        """
        width, rank = config.hidden_size, config.dspark_markov_rank
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov = MarkovHead(config.vocab_size, rank)
        self.confidence = ConfidenceHead(width + rank, temperatures)
        self._activation_dtype = activation_dtype
        for name, module in (("norm", self.norm), ("markov_head", self.markov), ("confidence_head", self.confidence)):
            last_block.add_module(name, module)

    def draft(
        self,
        base: torch.Tensor,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        draws: Draws,
    ) -> Drafts:
        """Draw the drafts of every request, each as the model itself would draw at that position.

        Args:
            base: [num_reqs, num_drafts, vocab_size] fp32, the head's logits of the block.
            hidden: [num_reqs, num_drafts, hidden_size], in front of the norm.
            anchors: [num_reqs] int, the token in front of the block's first draft.
            slots: [num_reqs] int64, slot of each request in the runner; negative: none, the drafts are not used.
            positions: [num_reqs, num_drafts] int64, of the drafts.
            draws: draws the tokens.
        """
        tokens, scores, previous = [], [], anchors
        for index in range(base.shape[1]):
            embedded = self.markov.embed(previous).to(self._activation_dtype)
            logits = base[:, index] + self.markov.head(embedded, torch.float32)
            previous = draws.draw(logits, slots, positions[:, index])
            features = torch.cat((hidden[:, index], embedded), dim=1)
            tokens.append(previous)
            scores.append(self.confidence.proj(features, torch.float32))
        score = (torch.cat(scores, dim=1) / self.confidence.temperatures).clamp(-MAX_SCORE, MAX_SCORE)
        return Drafts(tokens=torch.stack(tokens, dim=1), confidence=1.0 / (1.0 + torch.exp(-score)))
