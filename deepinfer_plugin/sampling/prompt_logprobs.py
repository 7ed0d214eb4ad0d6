"""Log-probabilities of prompt tokens: each request by itself, in the arithmetic of the sampled tokens.

vLLM's own worker class asks for as many best tokens as the greediest request of the step wants, in an order among ties
that follows this number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from deepinfer_kernels.log_softmax import token_log_softmax
from deepinfer_plugin.sampling.logprobs import LOGITS_MODES, score_rows

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.worker.gpu.input_batch import InputBatch

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]
ROWS_AT_ONCE = 256  # bounds the memory of the logits; rows do not depend on each other


class PromptLogprobs(PromptLogprobsWorker):
    """vLLM's request states, our arithmetic."""

    @classmethod
    def adopt(cls, stock: PromptLogprobsWorker) -> PromptLogprobs:
        """Take over the states of the object that the model runner has built."""
        worker = cls.__new__(cls)
        worker.__dict__.update(stock.__dict__)
        return worker

    def compute_prompt_logprobs(
        self,
        logits_fn: LogitsFunction,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray[Any, Any],
    ) -> dict[str, LogprobsTensors]:
        """Score the prompt rows of the step; a request's result comes with the last row of its prompt.

        Args:
            logits_fn: [num_rows, hidden_size] to [num_rows, vocab_size] fp32.
            hidden_states: [num_tokens, hidden_size] of the step.
            input_batch: layout of the step.
            all_token_ids: [max_num_reqs, max_model_len] int32.
            num_computed_tokens: unused; the step's layout says the same.
            prompt_lens: [max_num_reqs].

        Returns:
            request id to its scores, one row per prompt token but the first.
        """
        del num_computed_tokens
        done: dict[str, LogprobsTensors] = {}
        for index, req_id in enumerate(input_batch.req_ids):
            slot = int(input_batch.idx_mapping_np[index])
            span = _prompt_span(input_batch, index, int(prompt_lens[slot]))
            if span is None or not self.uses_prompt_logprobs[slot]:
                continue
            start, end, first_row = span
            parts: list[LogprobsTensors] = self.in_progress_prompt_logprobs[req_id]
            stop = min(end, int(prompt_lens[slot]) - 1)  # the last row predicts the first output token
            for low in range(start, stop, ROWS_AT_ONCE):
                high = min(low + ROWS_AT_ONCE, stop)
                logits = logits_fn(hidden_states[first_row + low - start : first_row + high - start]).float()
                wanted = int(self.num_prompt_logprobs[slot])
                parts.append(
                    score_rows(
                        logits,
                        all_token_ids[slot, low + 1 : high + 1].long(),
                        logits.shape[1] if wanted == -1 else wanted,
                        is_logits=self.logprobs_mode in LOGITS_MODES,
                    )
                )
            if end >= int(prompt_lens[slot]) and parts:
                done[req_id] = LogprobsTensors.cat(parts)
                parts.clear()
        return done

    def compute_prompt_token_id_logprobs(
        self,
        logits_fn: LogitsFunction,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        prompt_lens: np.ndarray[Any, Any],
    ) -> dict[str, torch.Tensor]:
        """The same for requests that name the ids to score at every prompt row (``prompt_logprob_token_ids``)."""
        done: dict[str, torch.Tensor] = {}
        for index, req_id in enumerate(input_batch.req_ids):
            request = self.token_id_scores.get(req_id)
            if request is None:
                continue
            prompt_len = int(prompt_lens[input_batch.idx_mapping_np[index]])
            span = _prompt_span(input_batch, index, prompt_len)
            if span is None or (request.scores is None and span[0] > request.start):
                # resumed after its scores were sent, or begun behind its first row, which would stay empty
                self.token_id_scores.pop(req_id)
                continue
            start, end, first_row = span
            if request.scores is None:
                request.scores = torch.full(request.token_ids.shape, -torch.inf, device=request.token_ids.device)
            stop = min(end, prompt_len - 1)
            for low in range(max(request.start, start), stop, ROWS_AT_ONCE):
                high = min(low + ROWS_AT_ONCE, stop)
                logits = logits_fn(hidden_states[first_row + low - start : first_row + high - start]).float()
                rows = slice(low - request.start, high - request.start)
                ids = request.token_ids[rows]
                is_logits = self.logprobs_mode in LOGITS_MODES
                request.scores[rows] = logits.gather(1, ids) if is_logits else token_log_softmax(logits, ids)
            if end >= prompt_len:
                done[req_id] = request.scores.masked_fill(request.pad, -torch.inf)
                self.token_id_scores.pop(req_id)
        return done


def _prompt_span(input_batch: InputBatch, index: int, prompt_len: int) -> tuple[int, int, int] | None:
    """Positions of a request's rows in the step, begin and end, and the first row; None where no prompt row is new."""
    start = int(input_batch.num_computed_prefill_tokens_np[index])
    is_resumed = prompt_len < int(input_batch.prefill_len_np[index])  # its prompt was scored before the preemption
    if start >= prompt_len or is_resumed:
        return None
    return start, start + int(input_batch.num_scheduled_tokens[index]), int(input_batch.query_start_loc_np[index])
