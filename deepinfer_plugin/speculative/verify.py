"""Exact-match verification: a draft is kept where the row before it draws the same token.

Every verified row is drawn as if its request decoded one token at a time: with its own noise, and with penalties, bad
words and masks that count the drafts before it. Up to the first draft that differs, those drafts are the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

from deepinfer_plugin.speculative.drafts import accepted_prefix

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from deepinfer_plugin.sampling.sampler import DeepInferSampler


class ExactMatchVerifier:
    """Stands where the model runner has its rejection sampler."""

    def __init__(self, sampler: DeepInferSampler, num_drafts: int) -> None:
        self._sampler = sampler
        self._num_columns = num_drafts + 1
        # The runner turns it off while it warms up. On: only the device knows the first row of each request.
        self.enable_adaptive_verification = False

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Draw every row of the step, and keep what its drafts got right.

        Args:
            logits: [num_rows, vocab_size] fp32, grammars applied.
            input_batch: layout of the step.
            draft_logits: unused: how likely the drafter found a draft does not matter.
            invalid_drafts: [num_rows] bool, drafts that a grammar has not checked; None: none.
        """
        del draft_logits
        sampler = self._sampler
        draw = sampler.draw(logits, input_batch)
        read = input_batch.input_ids[input_batch.logits_indices]
        tokens, num_kept = accepted_prefix(
            draw.sampled, read, input_batch.cu_num_logits, self._num_columns, invalid_drafts
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_kept,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        starts = input_batch.cu_num_logits.clone() if self.enable_adaptive_verification else None
        return sampler.output(
            draw, input_batch, tokens, num_sampled, num_rejected, starts=starts, rows_per_request=self._num_columns
        )
