"""Bounded replay in the model runner: which rows the model computes, planned on the host from known lengths."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from deepinfer_plugin.replay import counters
from deepinfer_plugin.replay.inputs import EncoderPassInputs, ReplayInputs
from deepinfer_plugin.replay.plan import EncoderPass, StepPlan, plan_decode, plan_step
from deepinfer_plugin.replay.requests import needs_every_row
from deepinfer_plugin.replay.window import Chunk, ReplayRule
from deepinfer_plugin.worker.image_inputs import ImageInputs

if TYPE_CHECKING:
    import numpy.typing as npt

LookbackIds = Callable[..., torch.Tensor]


class ReplayState:
    """Prompt lengths and hits by slot of the runner, and the buffer of decoder floors."""

    def __init__(self, rule: ReplayRule, max_num_reqs: int, depth: int, device: torch.device) -> None:
        self.rule = rule
        self._depth, self._device = depth, device
        self._num_prompt = np.zeros(max_num_reqs, dtype=np.int64)
        self._hit = np.zeros(max_num_reqs, dtype=np.int64)
        self._needs_every_row = np.zeros(max_num_reqs, dtype=np.bool_)
        # one buffer for the life of the process: a CUDA graph reads the same address at every replay
        self._floors = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._floors_np = np.zeros(max_num_reqs, dtype=np.int64)  # what the buffer holds

    def add_request(self, slot: int, data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption: its prompt is still the first ``prompt_len``."""
        every_row = needs_every_row(data.sampling_params)
        self._num_prompt[slot] = data.prompt_len
        self._hit[slot] = data.num_computed_tokens
        self._needs_every_row[slot] = every_row
        kind = "segment" if self.rule.segment else "bounded" if self.rule.replays_hits else "exact"
        is_unreplayed = every_row and self.rule.keep_tokens is not None
        counters.count_request(kind, data.num_computed_tokens, is_unreplayed=is_unreplayed)

    def dummy_inputs(self) -> ReplayInputs:
        """For runs that measure, warm up or capture: all rows."""
        return ReplayInputs(decoder_floors=self._floors)

    def plan(self, input_batch: InputBatch) -> StepPlan:
        """The plan of a step. Lengths of decode rows are upper bounds under speculation; all of them are kept."""
        slots = input_batch.idx_mapping_np
        if not input_batch.has_prefill and not self.rule.segment:
            # the common step: no list of requests is built for it
            return plan_decode(self._num_prompt[slots], self._needs_every_row[slots], input_batch.num_tokens, self.rule)
        chunks = []
        for index, slot in enumerate(slots.tolist()):
            start = int(input_batch.num_computed_tokens_np[index])
            chunks.append(
                Chunk(
                    start=start,
                    stop=start + int(input_batch.num_scheduled_tokens[index]),
                    num_prompt=int(self._num_prompt[slot]),
                    hit=int(self._hit[slot]),
                    needs_every_row=bool(self._needs_every_row[slot]),
                )
            )
        return plan_step(chunks, self.rule)

    def inputs(
        self,
        plan: StepPlan,
        input_batch: InputBatch,
        req_states: RequestState,
        lookback: torch.Tensor,
        images: ImageInputs | None,
        *,
        is_graph: bool,
    ) -> ReplayInputs:
        """Device tensors of a plan.

        Args:
            plan: of this step.
            input_batch: layout of the step.
            req_states: token history.
            lookback: [num_tokens, depth] int64 of the step's rows.
            images: what the step knows of images; None in an engine without.
            is_graph: the step replays a CUDA graph, which computes all rows.
        """
        counters.count_step(plan, is_graph=is_graph)
        self._hold_floors(plan.decoder_floors)
        rows = None if is_graph or plan.decoder_rows is None else self._to_device(plan.decoder_rows)
        return ReplayInputs(
            decoder_floors=self._floors,
            decoder_rows=rows,
            encoder_passes=tuple(
                self._pass_inputs(one, input_batch, req_states, lookback, images) for one in plan.encoder_passes
            ),
        )

    def _hold_floors(self, floors: "npt.NDArray[np.int64]") -> None:
        """Copy the floors of the step's requests; most steps have those of the step before, in the same order."""
        held = self._floors_np[: len(floors)]
        if not np.array_equal(held, floors):
            held[:] = floors
            async_tensor_h2d(floors, out=self._floors[: len(floors)], dtype=torch.int64)

    def _pass_inputs(
        self,
        one: EncoderPass,
        input_batch: InputBatch,
        req_states: RequestState,
        lookback: torch.Tensor,
        images: ImageInputs | None,
    ) -> EncoderPassInputs:
        source_rows, positions = self._to_device(one.source_rows), self._to_device(one.positions)
        own_rows = np.flatnonzero(one.source_rows >= 0)
        slots_np = input_batch.idx_mapping_np[one.requests].astype(np.int64)
        slots = self._to_device(slots_np)
        history = req_states.all_token_ids.gpu
        shift = torch.arange(self._depth + 1, device=self._device)
        earlier = positions[:, None] - shift  # [num_rows, 1 + depth]: the token and its predecessors
        # A replayed row lies in the history. Others have their ids from the step; in a run that measures memory they
        # may lie behind it: vLLM cuts max_num_batched_tokens into max_num_seqs requests, however long they become.
        place = earlier.clamp(0, history.shape[1] - 1)
        from_history = history[slots[:, None], place].long().masked_fill(earlier < 0, -1)
        is_replayed = source_rows < 0
        source = source_rows.clamp_min(0)
        inputs = EncoderPassInputs(
            input_ids=torch.where(is_replayed, from_history[:, 0], input_batch.input_ids[source].long()),
            lookback_ids=torch.where(is_replayed[:, None], from_history[:, 1:], lookback[source]),
            positions=positions,
            req_idx=self._to_device(one.requests).int(),
            floors=self._to_device(one.floors),
            source_rows=source_rows,
            own_rows=self._to_device(own_rows.astype(np.int64)),
            step_rows=self._to_device(one.source_rows[own_rows]),
        )
        return inputs if images is None else images.with_images(inputs, one, slots_np)

    def _to_device(self, values: "npt.NDArray[np.int64]") -> torch.Tensor:
        found: torch.Tensor = async_tensor_h2d(values, device=self._device)
        return found
