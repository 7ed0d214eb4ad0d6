"""Parameters of the requests of a step, one a row: gathered again only where a request or the order has changed.

Between two CUDA graphs every launch costs the host more time than the device, and most steps have the rows of the step
before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    Change = Callable[[torch.Tensor], torch.Tensor]


class RowParameters:
    """Gathered parameters of the last step.

    vLLM hands out another tensor wherever it copies parameters to the device, so the tensor itself tells what is stale.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(0, dtype=torch.int64)
        self._slots: np.ndarray[Any, Any] | None = None
        self._kept: dict[tuple[int, Change | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, rows: torch.Tensor, idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray[Any, Any]) -> None:
        """Take the layout of a step.

        Args:
            rows: [num_rows], row to slot; ``idx_mapping`` itself where every request has one row.
            idx_mapping: [num_reqs], request to slot.
            idx_mapping_np: the same on the host.
        """
        self._rows = rows
        if rows is not idx_mapping:  # with drafts the device alone may know which rows a request has
            self._slots, self._kept = None, {}
        elif self._slots is None or not np.array_equal(self._slots, idx_mapping_np):
            self._slots, self._kept = idx_mapping_np.copy(), {}

    def of(self, source: UvaBackedTensor, change: Change | None = None) -> torch.Tensor:
        """[num_rows, …] of ``source``, passed through ``change``; a tensor that later steps may get again."""
        key = (id(source), change)
        kept = self._kept.get(key)
        if kept is None or kept[0] is not source.gpu:
            values = source.gpu[self._rows]
            kept = self._kept[key] = (source.gpu, values if change is None else change(values))
        return kept[1]


def is_drawn(temperature: torch.Tensor) -> torch.Tensor:
    """1.0 where a row takes noise, 0.0 where it takes the largest logit; [num_rows] fp32."""
    return (temperature != 0.0).float()


def divisor(temperature: torch.Tensor) -> torch.Tensor:
    """What logits are divided by, [num_rows, 1] fp32: a greedy row keeps its own."""
    return torch.where(temperature == 0.0, 1.0, temperature)[:, None]
