"""The worker's part of a request's extra parameters: what ``DeepInferSampler`` keeps per slot.

Every row is decided by its own request: a row whose request asks for nothing keeps its bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_plugin.sampling.extras import FORCE_TOP_K, SUM_SMALLER, TOKEN_BLACKLIST

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class Blacklist(LogitsProcessor):
    """Tokens that a request never produces."""

    def __init__(self, req_states: LogitsProcRequestState) -> None:
        self._device = req_states.device
        self._shape = (req_states.max_num_reqs, req_states.vocab_size)
        self._is_used_np = np.zeros(req_states.max_num_reqs, dtype=bool)
        self._staged: dict[int, list[list[int]]] = {}
        self._banned: torch.Tensor | None = None  # [slots, vocab_size] bool, made for the first request that has one

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Stage the ranges of the request that takes the slot."""
        ranges = (sampling_params.extra_args or {}).get(TOKEN_BLACKLIST) or []
        if ranges or self._is_used_np[req_idx]:
            self._staged[req_idx] = ranges
        self._is_used_np[req_idx] = bool(ranges)
        return bool(ranges)

    def apply_staged_writes(self) -> None:
        """Copy the staged ranges to the device."""
        for slot, ranges in self._staged.items():
            if self._banned is None:
                self._banned = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            row = np.zeros(self._shape[1], dtype=bool)
            for first, last in ranges:
                row[first : last + 1] = True
            self._banned[slot] = torch.from_numpy(row).to(self._device)
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """-inf for the banned tokens of each row.

        Args:
            logits: [num_rows, vocab_size] fp32.
            ctx: layout of the step.

        Returns:
            A new tensor of the same shape; rows without a blacklist keep their bits.
        """
        if self._banned is None or not self._is_used_np[ctx.idx_mapping_np].any():
            return logits
        return logits.masked_fill(self._banned[ctx.expanded_idx_mapping.long()], -torch.inf)


class ForcedTopK:
    """How many largest logits a request is drawn among; 0: all."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._count_np = np.zeros(max_num_reqs, dtype=np.int64)
        self._count = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._is_stale = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Store the count of the request that takes the slot; whether it has one."""
        count = (sampling_params.extra_args or {}).get(FORCE_TOP_K, 0)
        self._is_stale |= bool(count != self._count_np[req_idx])
        self._count_np[req_idx] = count
        return bool(count)

    def apply_staged_writes(self) -> None:
        """Copy the counts to the device."""
        if self._is_stale:
            self._count.copy_(torch.from_numpy(self._count_np))
            self._is_stale = False

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, idx_mapping_np: np.ndarray[Any, Any]) -> torch.Tensor:
        """-inf outside the largest logits of each row; a tie at the border keeps the lower ids.

        Args:
            logits: [num_rows, vocab_size] fp32, not yet divided by the temperature.
            rows: [num_rows], row -> slot.
            idx_mapping_np: slots of the step's requests, on the host.
        """
        if not self._count_np[idx_mapping_np].any():
            return logits
        count = self._count[rows.long()]
        everything = torch.ones(logits.shape[0], dtype=torch.float32, device=logits.device)
        return restrict_logits(logits, count, everything, torch.zeros_like(everything))


class SumSmaller:
    """Which requests get the mass of their less likely tokens."""

    def __init__(self, max_num_reqs: int) -> None:
        self._is_wanted_np = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Store the wish of the request that takes the slot."""
        self._is_wanted_np[req_idx] = bool((sampling_params.extra_args or {}).get(SUM_SMALLER))

    def is_wanted(self, idx_mapping_np: np.ndarray[Any, Any]) -> bool:
        """Whether any request of the step wants it."""
        return bool(self._is_wanted_np[idx_mapping_np].any())
