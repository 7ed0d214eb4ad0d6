"""The worker's record of drafts: counts of the process, and the facts of the requests that ask for them.

A request asks with ``draft_facts`` (``facts``). Its facts travel as further columns of its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepinfer_plugin.sampling.extras import DRAFT_FACTS
from deepinfer_plugin.speculative.counters import VERIFICATION

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch


class DraftRecord:
    """What became of the drafts of one engine, step by step.

    Attributes:
        num_drafts: most drafts of a request in a step.
        confidence: [max_num_reqs + 1, num_drafts] fp32, of the last drafts of every slot; one address for the life of
            the process, as drafters write it within CUDA graphs. The last row takes what belongs to no request.
        has_confidence: whether the drafter says how sure it is.
    """

    def __init__(self, max_num_reqs: int, num_drafts: int, device: torch.device) -> None:
        self.num_drafts = num_drafts
        self.confidence = torch.zeros(max_num_reqs + 1, num_drafts, dtype=torch.float32, device=device)
        self.has_confidence = False
        self._is_wanted_np = np.zeros(max_num_reqs, dtype=bool)
        self._is_live = False
        self._drafted: Mapping[str, int] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Store the wish of the request that takes the slot."""
        self._is_wanted_np[req_idx] = bool((sampling_params.extra_args or {}).get(DRAFT_FACTS))

    def begin(self) -> None:
        """Count from now on: a request has come, and warm-up is over."""
        self._is_live = True

    def store_confidence(self, slots: torch.Tensor, confidence: torch.Tensor) -> None:
        """Keep what the drafter says of the drafts that the next step verifies.

        Args:
            slots: [num_reqs] int64, -1 for none.
            confidence: [num_reqs, num_drafts] fp32, the chance of each draft to be accepted if all before it are.
        """
        self.has_confidence = True
        self.confidence[slots] = confidence

    def note_drafted(self, drafted: Mapping[str, int]) -> None:
        """Say, before a step, how many drafts its requests had before a schedule cut them.

        Args:
            drafted: by request id; a request that is not in it verifies all that it had.
        """
        self._drafted = drafted

    def add_step(self, input_batch: InputBatch, num_sampled: torch.Tensor) -> torch.Tensor | None:
        """Count a step.

        Args:
            input_batch: layout of the step.
            num_sampled: [num_reqs] int32, tokens of each request that stand; 0 where a prompt goes on.

        Returns:
            Where a request of the step wants facts, [num_reqs, 3 or 3 + num_drafts] fp32: drafted, verified and
            accepted drafts of each request, and the confidences of its drafts if there are any. Else None.
        """
        if not self._is_live:
            return None
        drafted = self._take_drafted(input_batch)
        VERIFICATION.add_drafted(drafted, self.num_drafts)
        is_wanted = bool(self._is_wanted_np[input_batch.idx_mapping_np].any())
        confidence = None
        if self.has_confidence and (is_wanted or input_batch.num_draft_tokens > 0):
            confidence = self.confidence[input_batch.idx_mapping]
        starts = input_batch.cu_num_logits
        if input_batch.num_draft_tokens > 0:
            VERIFICATION.add_step(starts, num_sampled, self.num_drafts, confidence)
        if not is_wanted:
            return None
        counts = (
            torch.from_numpy(drafted).to(starts.device),
            starts[1:] - starts[:-1] - 1,
            (num_sampled - 1).clamp_min(0),
        )
        facts = torch.stack([count.float() for count in counts], dim=1)
        return facts if confidence is None else torch.cat((facts, confidence), dim=1)

    def _take_drafted(self, input_batch: InputBatch) -> np.ndarray[Any, Any]:
        """[num_reqs] int64, drafts of each request before a schedule cut them."""
        noted, self._drafted = self._drafted, {}
        counted = input_batch.num_draft_tokens_per_req
        verified = np.zeros(input_batch.num_reqs, np.int64) if counted is None else np.asarray(counted, np.int64)
        if not noted:
            return verified
        pairs = zip(input_batch.req_ids, verified.tolist(), strict=True)
        return np.array([noted.get(name, count) for name, count in pairs], dtype=np.int64)
