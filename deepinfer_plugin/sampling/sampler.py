"""The sampler of our model: vLLM's request states and logits processors, our arithmetic and noise.

What the stock sampler decides per batch (fused kernels, skipped stages, the order among ties) is decided per row here,
or is skipped only where no bit can change.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.sample_tokens import sample_tokens
from deepinfer_kernels.sum_smaller_probs import sum_smaller_probs
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.sampling.extra_states import Blacklist, ForcedTopK, SumSmaller
from deepinfer_plugin.sampling.force import ForcedTokens
from deepinfer_plugin.sampling.logprobs import LOGITS_MODES, score_rows
from deepinfer_plugin.sampling.row_parameters import RowParameters, divisor, is_drawn
from deepinfer_plugin.sampling.seeds import as_int64, prompt_hash
from deepinfer_plugin.sampling.sums import with_column
from deepinfer_plugin.speculative.facts import with_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from deepinfer_plugin.speculative.record import DraftRecord

# What these stage they stage when a request comes.
_STOCK_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token per row of logits.

    Attributes:
        logits: [num_rows, vocab_size], as the model and grammars left them.
        processed: [num_rows, vocab_size] fp32, what the tokens were drawn from.
        sampled: [num_rows] int64.
        num_nans: of each row, where vLLM counts them.
    """

    logits: torch.Tensor
    processed: torch.Tensor
    sampled: torch.Tensor
    num_nans: torch.Tensor | None


class DeepInferSampler(Sampler):
    """Draws each token from its own row, the request's seed, its prompt and its position.

    Attributes:
        drafts: what becomes of drafts; None in an engine without.
        row_parameters: what the last step gathered of its requests' parameters.
        is_stale: whether something was stored that the device does not see yet.
        unread: zeros, int64, stand-ins for what a step does not look at.
    """

    drafts: DraftRecord | None = None
    row_parameters: RowParameters
    is_stale: bool
    unread: torch.Tensor

    @classmethod
    def adopt(cls, stock: Sampler) -> DeepInferSampler:
        """Take over the request states and logits processors of the sampler that the model runner has built.

        Raises:
            ConfigError: the runner built another sampler than vLLM's stock one.
        """
        if type(stock) is not Sampler:
            raise ConfigError(
                f"sampler: the model runner built {type(stock).__name__}, expected Sampler; its draws would not be "
                "those of the seed, leave the option that selects it out"
            )
        sampler = cls.__new__(cls)
        sampler.__dict__.update(stock.__dict__)
        sampler.use_flashinfer = sampler.use_xpu_sampler = False  # they draw from a stream that the batch shares
        sampler.prompt_hashes = UvaBackedTensor(stock.sampling_states.max_num_reqs, dtype=torch.int64)
        states = LogitsProcRequestState.from_request_state(stock.req_states)
        # the blacklist before golden tokens, which win over all
        sampler.logits_processors = [*stock.logits_processors, Blacklist(states), ForcedTokens(states)]
        sampler.sum_smaller = SumSmaller(states.max_num_reqs)
        sampler.forced_top_k = ForcedTopK(states.max_num_reqs, states.device)
        sampler.row_parameters = RowParameters()
        sampler.has_foreign_processors = any(type(one) not in _STOCK_PROCESSORS for one in stock.logits_processors)
        sampler.is_stale = True
        # of a step in which every request has one row, and none is in its prompt
        sampler.one_each = torch.ones(states.max_num_reqs, dtype=torch.int32, device=states.device)
        sampler.none_each = torch.zeros_like(sampler.one_each)
        sampler.unread = torch.zeros(states.max_num_reqs, dtype=torch.int64, device=states.device)
        return sampler

    def set_prompt(self, req_idx: int, prompt_token_ids: Sequence[int]) -> None:
        """Store the hash of the prompt of the request that takes a slot; generated tokens are no part of it."""
        self.is_stale = True
        self.prompt_hashes.np[req_idx] = as_int64(prompt_hash(prompt_token_ids))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Store the parameters of the request that takes a slot."""
        self.is_stale = True
        if sampling_params.seed is not None:
            # the seeds tensor is int64 and the seed of a sample of n > 1 may lie above it
            sampling_params = copy(sampling_params)
            sampling_params.seed = as_int64(sampling_params.seed)
        super().add_request(req_idx, sampling_params)
        self.sum_smaller.add_request(req_idx, sampling_params)
        if self.drafts is not None:
            self.drafts.add_request(req_idx, sampling_params)
        self.needs_logits_processing[req_idx] |= self.forced_top_k.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Make what was stored visible to the device; vLLM calls it in every step, and in most nothing was stored.

        Left out, a step keeps the buffers of the step before; the next copy goes to the others, which are free by then.
        """
        if not (self.is_stale or self.has_foreign_processors):
            return
        self.is_stale = False
        super().apply_staged_writes()
        self.prompt_hashes.copy_to_uva()
        self.forced_top_k.apply_staged_writes()

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray[Any, Any],
        skip_top_k_top_p: bool = False,
    ) -> torch.Tensor:
        """Processors, forced top-k, temperature, then min-p, top-k and top-p: [num_rows, vocab_size] fp32.

        Where no request of the step needs any of it ``logits`` comes back itself; processing would change no bit of it.
        """
        if not self.needs_logits_processing[idx_mapping_np].any():
            return logits.float()
        processed = logits.to(torch.float32, copy=True)
        context = LogitsContext(
            expanded_idx_mapping=expanded_idx_mapping,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_local_pos=expanded_local_pos,
            input_ids=input_ids,
            pos=pos,
            seq_lens_upper_bound_np=seq_lens_upper_bound_np,
        )
        for processor in self.logits_processors:
            processed = processor.apply(processed, context)
        self.thinking_budget_state.apply(processed, context)  # last: nothing may undo what it forces
        processed = self.forced_top_k.apply(processed, expanded_idx_mapping, idx_mapping_np)
        states, parameters = self.sampling_states, self.row_parameters
        parameters.begin(expanded_idx_mapping, idx_mapping, idx_mapping_np)
        divided: torch.Tensor = processed / parameters.of(states.temperature, divisor)
        if not self._restricts(idx_mapping_np, skip_top_k_top_p):
            return divided
        top_k, top_p = parameters.of(states.top_k), parameters.of(states.top_p)
        if skip_top_k_top_p:
            top_k, top_p = torch.zeros_like(top_k), torch.ones_like(top_p)
        return restrict_logits(divided, top_k, top_p, parameters.of(states.min_p))

    def _restricts(self, idx_mapping_np: np.ndarray[Any, Any], skip_top_k_top_p: bool) -> bool:
        """Whether a request of the step has min-p, top-k or top-p; a row without any keeps every bit."""
        states = self.sampling_states
        has_min_p = bool((states.min_p.np[idx_mapping_np] > 0.0).any())
        has_top_k = bool((states.top_k.np[idx_mapping_np] < states.vocab_size).any())
        has_top_p = bool((states.top_p.np[idx_mapping_np] < 1.0).any())
        return has_min_p or (not skip_top_k_top_p and (has_top_k or has_top_p))

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray[Any, Any],
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row, [num_rows] int64, and the processed logits it was drawn from."""
        processed = self.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            input_ids,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states, parameters = self.sampling_states, self.row_parameters
        parameters.begin(expanded_idx_mapping, idx_mapping, idx_mapping_np)
        sampled = sample_tokens(
            processed,
            parameters.of(states.temperature, is_drawn),  # already divided by it
            parameters.of(states.seeds),
            parameters.of(self.prompt_hashes),
            # ``pos`` is that of the token read; without noise nobody looks at it
            pos.long() + 1 if self._draws(idx_mapping_np) else pos.long(),
        )
        return sampled, processed

    def _draws(self, idx_mapping_np: np.ndarray[Any, Any]) -> bool:
        """Whether a request of the step takes noise."""
        return bool((self.sampling_states.temperature.np[idx_mapping_np] != 0.0).any())

    def draw(self, logits: torch.Tensor, input_batch: InputBatch) -> Draw:
        """One token for every row of logits: [num_rows, vocab_size] fp32."""
        num_nans = get_num_nans(logits) if self.compute_nans else None
        rows, slots = input_batch.logits_indices, input_batch.idx_mapping_np
        is_processed = bool(self.needs_logits_processing[slots].any())
        needs_positions = is_processed or self._draws(slots)
        sampled, processed = self.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            slots,
            input_batch.positions[rows] if needs_positions else self._unread(rows),
            input_batch.input_ids[rows] if is_processed else self._unread(rows),
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        return Draw(logits=logits, processed=processed, sampled=sampled, num_nans=num_nans)

    def _unread(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeros [num_rows] int64 in the place of what no row of the step looks at."""
        num_rows = rows.shape[0]
        if num_rows > self.unread.shape[0]:  # drafts
            self.unread = self.unread.new_zeros(num_rows)
        return self.unread[:num_rows]

    def output(
        self,
        draw: Draw,
        input_batch: InputBatch,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *,
        starts: torch.Tensor | None = None,
        rows_per_request: int = 1,
    ) -> SamplerOutput:
        """What the runner takes, scored where a request asks for log-probabilities.

        Args:
            draw: of the step.
            input_batch: layout of the step.
            tokens: [num_reqs, rows_per_request] int64.
            num_sampled: [num_reqs] int32, tokens of each request that stand.
            num_rejected: [num_reqs] int32, drafts that do not.
            starts: [num_reqs + 1] int32, first row of each request where the host does not know it.
            rows_per_request: most rows of a request.
        """
        scores = self._score(draw, input_batch, starts)
        facts = None if self.drafts is None else self.drafts.add_step(input_batch, num_sampled)
        if facts is not None and scores is not None:  # no front end of ours: nothing carries them
            scores = with_columns(scores, facts, input_batch.cu_num_logits)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=scores,
            num_nans=draw.num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=self._sampling_mask(draw.processed, num_sampled, input_batch, rows_per_request),
        )

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Sample one token for every request; each has one row of logits."""
        draw = self.draw(logits, input_batch)
        if self.trace_replay_state is not None:
            self.trace_replay_state.apply_trace(draw.sampled, input_batch.idx_mapping)
        num_reqs = input_batch.num_reqs
        if self.drafts is None and not input_batch.has_prefill:
            num_sampled, num_rejected = self.one_each[:num_reqs], self.none_each[:num_reqs]
        else:  # a request whose prompt goes on samples none
            num_sampled, num_rejected = get_num_sampled_and_rejected(
                input_batch.seq_lens.new_ones(num_reqs),
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                self.req_states.prefill_len.gpu,
            )
        return self.output(draw, input_batch, draw.sampled.view(-1, 1), num_sampled, num_rejected)

    def _score(self, draw: Draw, input_batch: InputBatch, starts: torch.Tensor | None) -> Any:
        """vLLM's ``LogprobsTensors`` of the step, or None where no request asks for any."""
        dims = self.get_logprobs_dims(input_batch.idx_mapping_np)
        if dims is None:
            return None
        num_logprobs, max_token_ids = dims
        has_extra_rows = draw.logits.shape[0] != input_batch.num_reqs
        custom = None
        if max_token_ids > 0:
            state, rows = self.logprob_token_ids_state, input_batch.expanded_idx_mapping
            custom = (state.num_token_ids.gpu[rows], state.token_ids.gpu[rows, :max_token_ids].long())
        first_rows = input_batch.cu_num_logits_np.tolist() if starts is None else starts
        scores = score_rows(
            draw.processed if self.logprobs_mode in PROCESSED_LOGPROBS_MODES else draw.logits.float(),
            draw.sampled,
            num_logprobs,
            is_logits=self.logprobs_mode in LOGITS_MODES,
            custom=custom,
            cu_num_logits=first_rows if has_extra_rows else None,
        )
        if not self.sum_smaller.is_wanted(input_batch.idx_mapping_np):
            return scores
        return with_column(scores, sum_smaller_probs(draw.processed, draw.sampled))

    def _sampling_mask(
        self, processed: torch.Tensor, num_sampled: torch.Tensor, input_batch: InputBatch, rows_per_request: int
    ) -> Any:
        """The ids that each row could have become, for ``--return-sampling-mask``; None without it."""
        if not self.return_sampling_mask:
            return None
        widest = int(self.sampling_states.top_k.np[input_batch.idx_mapping_np].max())  # of the buffer, not of a row
        return SamplingMaskTensors.from_logits(
            processed, input_batch.cu_num_logits, num_sampled, widest, rows_per_request
        )
