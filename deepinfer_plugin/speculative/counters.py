"""What verification did in this process, counted on the device; read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_ONE = 1 << 24  # fixed point of confidences: a sum of integers is the same in any order


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts by position in the block of drafts; all tuples have the length of the block.

    Attributes:
        steps: steps of requests that had drafts.
        drafted: drafts proposed and scheduled.
        verified: drafts with a row of their own in the model.
        accepted: drafts that stand.
        reached: verified drafts with all drafts before them accepted.
        confidence_error: sum of |confidence - accepted| over the reached drafts; empty where drafts have no confidence.
    """

    steps: int = 0
    drafted: tuple[int, ...] = ()
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    confidence_error: tuple[float, ...] = ()

    def since(self, before: Figures) -> Figures:
        """What came after ``before``, an earlier reading of the same counters."""
        return Figures(
            steps=self.steps - before.steps,
            drafted=_less(self.drafted, before.drafted),
            verified=_less(self.verified, before.verified),
            accepted=_less(self.accepted, before.accepted),
            reached=_less(self.reached, before.reached),
            confidence_error=_less(self.confidence_error, before.confidence_error),
        )

    @property
    def by_kind(self) -> dict[str, tuple[int, ...]]:
        """``drafted``, ``verified`` and ``accepted`` by draft position; one 0 each before the first step."""
        kinds = {"drafted": self.drafted, "verified": self.verified, "accepted": self.accepted}
        return {name: counts or (0,) for name, counts in kinds.items()}

    @property
    def verified_length(self) -> float | None:
        """Mean rows of a request in a step: 1 and its verified drafts. None without steps."""
        return 1.0 + sum(self.verified) / self.steps if self.steps else None

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens of a request in a step: 1 and its accepted drafts. None without steps."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else None

    @property
    def acceptance(self) -> Mapping[int, float]:
        """Accepted over verified, by position; positions without a verified draft are left out."""
        return _ratios(self.accepted, self.verified)

    @property
    def mean_confidence_error(self) -> Mapping[int, float]:
        """Mean of |confidence - accepted| over the reached drafts, by position; as ``acceptance``."""
        return _ratios(self.confidence_error, self.reached)


@dataclass(slots=True)
class Verification:
    """Counts of all steps; the tensors are None before the first step that verified a draft.

    Attributes:
        steps: steps of requests that had drafts.
        drafted: [num_drafts] int64, drafts by position; None before the first step.
        ends: [width * width] int64, width = num_drafts + 2: steps of requests by their rows and the tokens that stand.
        confidence: [width * width, num_drafts] int64, sums of the confidences by the same index.
    """

    steps: int = 0
    drafted: np.ndarray[Any, Any] | None = None
    ends: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget everything."""
        self.steps, self.drafted, self.ends, self.confidence = 0, None, None, None

    def add_drafted(self, drafted: np.ndarray[Any, Any], num_drafts: int) -> None:
        """Count drafts of a step, which the host knows; called before ``add_step``.

        Args:
            drafted: [num_reqs] int64.
            num_drafts: most drafts of a request in a step.
        """
        counts = (drafted[:, None] > np.arange(num_drafts)).sum(axis=0)
        if self.drafted is not None and len(self.drafted) != num_drafts:
            self.reset()  # the counts are those of an earlier engine of this process
        self.steps += int(np.count_nonzero(drafted))
        self.drafted = counts if self.drafted is None else self.drafted + counts

    def add_step(
        self,
        cu_num_logits: torch.Tensor,
        num_sampled: torch.Tensor,
        num_drafts: int,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Count what a step verified.

        Args:
            cu_num_logits: [num_reqs + 1] int32, first row of each request.
            num_sampled: [num_reqs] int32, tokens that stand; 0 where a prompt goes on.
            num_drafts: most drafts of a request in a step.
            confidence: [num_reqs, num_drafts] fp32 of the drafts; None: they have none.
        """
        import torch

        width = num_drafts + 2
        if self.ends is None:
            self.ends = torch.zeros(width * width, dtype=torch.int64, device=num_sampled.device)
        num_rows = cu_num_logits[1:] - cu_num_logits[:-1]
        index = torch.add(num_sampled, num_rows, alpha=width).long()
        self.ends.index_add_(0, index, torch.ones_like(index))
        if confidence is not None:
            if self.confidence is None:
                self.confidence = self.ends.new_zeros(width * width, num_drafts)
            self.confidence.index_add_(0, index, (confidence.nan_to_num() * _ONE).long())

    def figures(self) -> Figures:
        """All counts; waits for the device."""
        drafted = () if self.drafted is None else tuple(self.drafted.tolist())
        num_drafts = len(drafted)
        if self.ends is None:
            none = (0,) * num_drafts
            return Figures(steps=self.steps, drafted=drafted, verified=none, accepted=none, reached=none)
        verified, accepted, reached = ([0] * num_drafts for _ in range(3))
        error = [0] * num_drafts
        sums = None if self.confidence is None else self.confidence.tolist()
        for index, count in enumerate(self.ends.tolist()):
            num_rows, num_tokens = divmod(index, num_drafts + 2)
            for position in range(min(num_rows - 1, num_drafts) if count and num_tokens else 0):
                verified[position] += count
                is_accepted = position < num_tokens - 1
                accepted[position] += count * is_accepted
                if position <= num_tokens - 1:
                    reached[position] += count
                    said = 0 if sums is None else sums[index][position]
                    error[position] += count * _ONE - said if is_accepted else said
        return Figures(
            steps=self.steps,
            drafted=drafted,
            verified=tuple(verified),
            accepted=tuple(accepted),
            reached=tuple(reached),
            confidence_error=() if sums is None else tuple(value / _ONE for value in error),
        )


VERIFICATION = Verification()


def _less[Number: (int, float)](values: tuple[Number, ...], before: tuple[Number, ...]) -> tuple[Number, ...]:
    return tuple(a - b for a, b in zip(values, before, strict=True)) if before else values


def _ratios(values: Sequence[float], counts: Sequence[int]) -> Mapping[int, float]:
    return {place: value / counts[place] for place, value in enumerate(values) if counts[place]}
