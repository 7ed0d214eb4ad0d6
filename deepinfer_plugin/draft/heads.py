"""What turns the rows of a draft block into tokens, one after the other, and says how likely each will be accepted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.sample_tokens import sample_tokens
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.linear import Embedding, PlainLinear, RMSNorm

if TYPE_CHECKING:
    from deepinfer_plugin.sampling.sampler import DeepInferSampler

MAX_SCORE = 60.0
"""Bound of a confidence's logit: exp of it is finite in fp32. Source: DI, tl/dflash.py."""


class MarkovHead(nn.Module):
    """Adds to the logits of a token what its predecessor says: a low-rank matrix of vocab_size x vocab_size."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, rank)
        self.head = PlainLinear(vocab_size, rank)


class ConfidenceHead(nn.Module):
    """Scores a draft from the row that it comes from and the embedding of its predecessor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = PlainLinear(1, width)


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

    def __init__(self, config: ModelConfig, last_block: nn.Module, activation_dtype: torch.dtype) -> None:
        width, rank = config.hidden_size, config.dspark_markov_rank
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov = MarkovHead(config.vocab_size, rank)
        self.confidence = ConfidenceHead(width + rank)
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
        sampler: "DeepInferSampler",
    ) -> Drafts:
        """Draw the drafts of every request, each as the model itself would draw at that position.

        Args:
            base: [num_reqs, num_drafts, vocab_size] fp32, the head's logits of the block.
            hidden: [num_reqs, num_drafts, hidden_size], in front of the norm.
            anchors: [num_reqs] int, the token in front of the block's first draft.
            slots: [num_reqs] int64, row of each request's sampling parameters; negative: none, the drafts are not used.
            positions: [num_reqs, num_drafts] int64, of the drafts.
            sampler: holds seeds, prompts and sampling parameters.
        """
        tokens, scores, previous = [], [], anchors
        for index in range(base.shape[1]):
            embedded = self.markov.embed(previous).to(self._activation_dtype)
            logits = base[:, index] + self.markov.head(embedded, torch.float32)
            previous = draw(sampler, logits, slots, positions[:, index])
            features = torch.cat((hidden[:, index], embedded), dim=1)
            tokens.append(previous)
            scores.append(self.confidence.proj(features, torch.float32))
        score = torch.cat(scores, dim=1).clamp(-MAX_SCORE, MAX_SCORE)
        return Drafts(tokens=torch.stack(tokens, dim=1), confidence=1.0 / (1.0 + torch.exp(-score)))


def draw(
    sampler: "DeepInferSampler", logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token a row, [num_rows] int64, with the temperature, the limits and the noise that the model will draw with.

    Penalties, masks and other rules of the request do not act here: where they change the model's token, the draft is
    rejected.

    Args:
        sampler: holds seeds, prompts and sampling parameters.
        logits: [num_rows, vocab_size] fp32.
        slots: [num_rows] int64, row of each request's sampling parameters; negative: any.
        positions: [num_rows] int64, of the tokens to draw.
    """
    states, rows = sampler.sampling_states, slots.clamp_min(0)
    temperature = states.temperature.gpu[rows]
    scaled = logits / torch.where(temperature == 0.0, 1.0, temperature)[:, None]
    limited = restrict_logits(scaled, states.top_k.gpu[rows], states.top_p.gpu[rows], states.min_p.gpu[rows])
    is_drawn = (temperature != 0.0).float()  # already divided by it
    return sample_tokens(limited, is_drawn, states.seeds.gpu[rows], sampler.prompt_hashes.gpu[rows], positions)
