"""Planted faults of the ranks: workers that take sums by the number of ranks, or what ranks own as it arrives.

Each is a worker class, see ``FaultyWorker``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_plugin.draft.drafter import DSparkV41DraftModel
from deepinfer_plugin.engine_child.faulty_worker import FaultyWorker
from deepinfer_plugin.model import attention, moe

Function = Callable[..., Any]


class SumCutByRanks(FaultyWorker):
    """The depth of wo_b is cut into as many parts as there are ranks, as row parallelism does."""

    def plant(self) -> None:
        """Cut the sum of every product of attention that has shares."""
        original: Function = vars(attention)["mxfp8_linear"]

        def cut(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, num_shards: int, **options: Any) -> Any:
            self.acts()
            parts = zip(*(tensor.chunk(num_shards, dim=1) for tensor in (x, weight, scale)), strict=True)
            return sum(original(*(part.contiguous() for part in of_rank), **options) for of_rank in parts)

        vars(attention)["mxfp8_linear"] = cut


class PartialSumsOfExperts(FaultyWorker):
    """Every rank adds its own experts, then ranks are added, as an all-reduce does."""

    def plant(self) -> None:
        """Add the later slots and the shared expert before the first slot."""
        original: Function = vars(moe)["moe_combine"]

        def reduced(expert_out: torch.Tensor, shared_out: torch.Tensor) -> Any:
            self.acts()
            return expert_out[:, 0] + original(expert_out[:, 1:].contiguous(), shared_out)

        vars(moe)["moe_combine"] = reduced


class OrderOfArrival(FaultyWorker):
    """What a rank has itself is there first, and stands first."""

    def plant(self) -> None:
        """Turn the columns that were gathered, over the process group or over memory of the ranks."""
        original: Function = Ranks.gather_columns

        def arrived(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
            self.acts()
            return torch.roll(original(ranks, x), -ranks.rank * x.shape[-1], -1)

        Ranks.gather_columns = arrived  # type: ignore[method-assign,assignment]


class OtherDraftsOnOneRank(FaultyWorker):
    """The second rank drafts, and so reads, other tokens than the first; for an engine with draft blocks."""

    def plant(self) -> None:
        """Move every draft of that rank by one id."""
        original: Function = DSparkV41DraftModel.sample_sequential

        def moved(model: DSparkV41DraftModel, speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> bool:
            done = original(model, speculator, num_reqs, head_hidden)
            if model.parallel.tensor.rank == 1:
                self.acts()
                drafts = speculator.draft_tokens[:num_reqs]
                drafts.copy_((drafts + 1) % model.config.vocab_size)
            return bool(done)

        DSparkV41DraftModel.sample_sequential = moved  # type: ignore[method-assign, assignment]


FAULTS = (SumCutByRanks, PartialSumsOfExperts, OrderOfArrival, OtherDraftsOnOneRank)
