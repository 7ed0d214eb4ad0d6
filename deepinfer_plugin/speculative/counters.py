"""What verification did in this process, counted on the device; read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_DRAFTS = 16  # positions that are counted apart; later ones count with the last


@dataclass(slots=True)
class Verification:
    """Counts per draft position, [2, MAX_DRAFTS] int64: verified, accepted; None before the first step."""

    counts: torch.Tensor | None = None

    def add_step(self, cu_num_logits: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Count a step.

        Args:
            cu_num_logits: [num_reqs + 1] int32, first row of each request.
            num_sampled: [num_reqs] int32, tokens that stand; 0 where a prompt goes on.
        """
        import torch

        verified = (cu_num_logits[1:] - cu_num_logits[:-1] - 1).masked_fill(num_sampled == 0, 0)
        both = torch.stack((verified, (num_sampled - 1).clamp_min(0)))  # [2, num_reqs]
        position = torch.arange(MAX_DRAFTS, device=both.device)
        counts = (position < both[:, :, None]).long().cumsum(dim=1)[:, -1]  # [2, MAX_DRAFTS]
        self.counts = counts if self.counts is None else self.counts + counts

    def figures(self) -> dict[str, tuple[int, ...]]:
        """``verified`` and ``accepted`` by draft position."""
        if self.counts is None:
            return {"verified": (0,) * MAX_DRAFTS, "accepted": (0,) * MAX_DRAFTS}
        verified, accepted = self.counts.tolist()
        return {"verified": tuple(verified), "accepted": tuple(accepted)}


VERIFICATION = Verification()
