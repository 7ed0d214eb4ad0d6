"""Golden tokens: a stage of the sampler that lets a request produce given tokens first, see ``extras.py``.

Raw log-probabilities are taken before it acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from deepinfer_plugin.sampling.extras import GOLDEN_TOKENS

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams


class ForcedTokens(LogitsProcessor):
    """Output token k of a request becomes ``extra_args["golden_token_ids"][k]``; later tokens are free.

    Which token is forced follows from the row's position alone, so chunking, preemption and row order cannot move it.
    """

    def __init__(self, req_states: LogitsProcRequestState) -> None:
        import torch

        self._prompt_len_np = req_states.prompt_len.np
        self._device = req_states.device
        slots = req_states.max_num_reqs
        self._is_forced_np = np.zeros(slots, dtype=bool)
        self._staged: dict[int, list[int]] = {}  # slot -> tokens waiting for apply_staged_writes
        self._tokens = torch.zeros((slots, 1), dtype=torch.int64, device=self._device)  # [slots, longest list]
        self._num_tokens = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._first_position = torch.zeros(slots, dtype=torch.int64, device=self._device)  # of output token 0
        self._vocabulary = torch.arange(req_states.vocab_size, device=self._device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Stage the list of the request that takes the slot."""
        tokens = (sampling_params.extra_args or {}).get(GOLDEN_TOKENS) or []
        self._is_forced_np[req_idx] = bool(tokens)
        self._staged[req_idx] = tokens
        return bool(tokens)

    def apply_staged_writes(self) -> None:
        """Copy the staged lists to the device."""
        import torch

        for slot, tokens in self._staged.items():
            missing = len(tokens) - self._tokens.shape[1]
            if missing > 0:
                self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))
            if tokens:
                self._tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            self._num_tokens[slot] = len(tokens)
            self._first_position[slot] = int(self._prompt_len_np[slot])
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Leave one possible token in the rows that are forced.

        Args:
            logits: [num_rows, vocab_size] fp32.
            ctx: layout of the step; ``pos`` is the position that each row has read.

        Returns:
            A new tensor of the same shape; rows that are not forced keep their bits.
        """
        import torch

        if not self._is_forced_np[ctx.idx_mapping_np].any():
            return logits
        slots = ctx.expanded_idx_mapping.long()
        step = ctx.pos + 1 - self._first_position[slots]  # [num_rows] index of the output token
        is_forced = (step >= 0) & (step < self._num_tokens[slots])
        token = self._tokens[slots, step.clamp(0, self._tokens.shape[1] - 1)]
        only = torch.where(self._vocabulary == token[:, None], 0.0, -torch.inf).to(logits.dtype)
        return torch.where(is_forced[:, None], only, logits)
