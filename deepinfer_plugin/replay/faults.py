"""Planted faults of bounded replay, and observers that count what the engine really did.

Each is a context manager that yields ``Calls``, for ``EngineRun.faults``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from deepinfer_kernels.hc_norm import SublayerInput
from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.model.attention import Attention
from deepinfer_plugin.model.hyper_connection import Mix
from deepinfer_plugin.model.step import Step
from deepinfer_plugin.replay import window
from deepinfer_plugin.replay.plan import EncoderPass, StepPlan, plan_step
from deepinfer_plugin.replay.window import Chunk, ReplayRule
from deepinfer_plugin.worker import replay_state
from deepinfer_plugin.worker.model_state import DeepInferModelState
from deepinfer_plugin.worker.replay_state import ReplayState


@contextmanager
def decoder_rows_counted() -> Iterator[Calls]:
    """Observer: rows times decoder layers that pass through attention."""
    count = Calls()
    original = Attention.forward

    def forward(
        self: Attention, given: SublayerInput, streams: torch.Tensor, mix: Mix, step: Step | None, *args: Any
    ) -> Any:
        if step is not None and self.ratio == 1:  # in these models the decoder's layers and no other
            count.calls += given.x.shape[0]
        return original(self, given, streams, mix, step, *args)

    with mock.patch.object(Attention, "forward", forward):
        yield count


@contextmanager
def cached_pages_hashed() -> Iterator[Calls]:
    """Observer: hashes the cached pages of every hit when it is admitted and when it ends; counts the pages."""
    watch = _PageWatch()
    add, remove, attn = (
        DeepInferModelState.add_request,
        DeepInferModelState.remove_request,
        DeepInferModelState.prepare_attn,
    )

    def add_request(self: DeepInferModelState, slot: int, data: Any) -> None:
        add(self, slot, data)
        watch.begin(self, data)

    def remove_request(self: DeepInferModelState, req_id: str) -> None:
        watch.end(req_id)
        remove(self, req_id)

    def prepare_attn(self: DeepInferModelState, *args: Any, **kwargs: Any) -> Any:
        watch.config = args[5]
        return attn(self, *args, **kwargs)

    with (
        mock.patch.object(DeepInferModelState, "add_request", add_request),
        mock.patch.object(DeepInferModelState, "remove_request", remove_request),
        mock.patch.object(DeepInferModelState, "prepare_attn", prepare_attn),
    ):
        yield watch.count
        for req_id in list(watch.pages):
            watch.end(req_id)


class _PageWatch:
    """Pages by request: the cache, the block, and the hash of its bytes at admission."""

    def __init__(self) -> None:
        self.count = Calls()
        self.config: Any = None
        self.pages: dict[str, list[tuple[Any, int, str]]] = {}

    def begin(self, state: DeepInferModelState, data: Any) -> None:
        hit = data.num_computed_tokens
        if hit == 0:
            return
        layers = state.vllm_config.compilation_config.static_forward_context
        found = self.pages[data.req_id] = []
        for group, block_ids in zip(self.config.kv_cache_groups, data.block_ids, strict=True):
            spec = group.kv_cache_spec
            if spec.prefix_cacheable:
                blocks = [block for block in block_ids[: hit // spec.block_size] if block != 0]  # 0 is the null block
                found += [
                    (layers[name], block, _page(layers[name], block)) for name in group.layer_names for block in blocks
                ]

    def end(self, req_id: str) -> None:
        for layer, block, before in self.pages.pop(req_id, []):
            self.count.calls += 1
            assert _page(layer, block) == before, f"{layer.prefix}: cached block {block} of {req_id} was rewritten"


def _page(layer: Any, block: int) -> str:
    return hashlib.sha256(layer.kv_cache[block].contiguous().numpy().tobytes()).hexdigest()


@contextmanager
def as_if_in_a_graph() -> Iterator[Calls]:
    """Observer: steps of single rows take the path of a CUDA graph, whose rows are all computed."""
    count = Calls()
    original = DeepInferModelState.prepare_attn

    def prepare_attn(self: DeepInferModelState, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = original(self, input_batch, *args, **kwargs)
        self._is_graph = bool((input_batch.num_scheduled_tokens == 1).all())
        count.calls += self._is_graph
        return metadata

    with mock.patch.object(DeepInferModelState, "prepare_attn", prepare_attn):
        yield count


@contextmanager
def floor_of_the_chunk() -> Iterator[Calls]:
    """Fault: the kept rows are the last ones of each chunk, as in engines whose replay follows the chunks."""
    with _chunks_changed(lambda chunk: replace(chunk, num_prompt=min(chunk.stop, chunk.num_prompt))) as count:
        yield count


@contextmanager
def floor_only_in_the_first_chunk() -> Iterator[Calls]:
    """Fault: later chunks of a prompt hide no window key of the decoder, and compute every row."""
    with _chunks_changed(lambda chunk: replace(chunk, needs_every_row=chunk.start > 0)) as count:
        yield count


@contextmanager
def _chunks_changed(change: Callable[[Chunk], Chunk]) -> Iterator[Calls]:
    count = Calls()
    original = plan_step

    def changed(chunks: Any, rule: ReplayRule) -> Any:
        altered = [change(chunk) for chunk in chunks]
        count.calls += altered != list(chunks)
        return original(altered, rule)

    with mock.patch.object(replay_state, "plan_step", changed):
        yield count


@contextmanager
def floor_lost_after_preemption() -> Iterator[Calls]:
    """Fault: a request that resumes counts its generated tokens as prompt."""
    count = Calls()
    original = ReplayState.add_request

    def add_request(self: ReplayState, slot: int, data: Any) -> None:
        original(self, slot, data)
        num_tokens = len(data.prefill_token_ids)
        count.calls += num_tokens > data.prompt_len
        self._num_prompt[slot] = num_tokens

    with mock.patch.object(ReplayState, "add_request", add_request):
        yield count


@contextmanager
def hits_not_limited() -> Iterator[Calls]:
    """Fault: a prefix hit may cover rows that the decoder layers have to compute."""
    count = Calls()

    def hit_limit(self: ReplayRule, num_prompt: int, *, needs_every_row: bool = False) -> int:
        del needs_every_row
        count.calls += 1
        return num_prompt

    with mock.patch.object(ReplayRule, "hit_limit", hit_limit):
        yield count


@contextmanager
def decoder_windows_not_hidden() -> Iterator[Calls]:
    """Fault: the decoder's rows see window keys of rows before the floor, which nobody wrote."""
    count = Calls()

    def with_floors(self: Step, request_floors: torch.Tensor) -> Step:
        count.calls += int((request_floors > 0).sum())
        return self

    with mock.patch.object(Step, "with_floors", with_floors):
        yield count


@contextmanager
def cached_entries_rewritten() -> Iterator[Calls]:
    """Fault: replayed rows write their compressed KV and index keys over the cached ones."""
    count = Calls()
    original = Step.entry_write_slots

    def entry_write_slots(self: Step, metadata: Any, ratio: int) -> torch.Tensor:
        if not self._has_replayed_rows:
            return original(self, metadata, ratio)
        slots = self.token_write_slots(metadata)
        closes = (self.positions + 1) % ratio == 0
        assert self._source_rows is not None
        count.calls += int((closes & (self._source_rows < 0)).sum())
        return torch.where(closes, slots // ratio, -1)

    with mock.patch.object(Step, "entry_write_slots", entry_write_slots):
        yield count


@contextmanager
def hit_without_replay() -> Iterator[Calls]:
    """Fault: a chunk that starts at a border does not compute the windows before it again."""
    count = Calls()
    original = window.is_border

    def is_border(position: int, chunk: Chunk, rule: ReplayRule) -> bool:
        at_start = position == chunk.start and original(position, chunk, rule)
        count.calls += at_start
        return original(position, chunk, rule) and not at_start

    with mock.patch.object(window, "is_border", is_border):
        yield count


@contextmanager
def passes_by_request() -> Iterator[Calls]:
    """Fault: every request begins with the first pass, though it may have hit what another one computes later."""
    count = Calls()
    original = ReplayState.inputs

    def inputs(self: ReplayState, plan: StepPlan, *args: Any, **kwargs: Any) -> Any:
        passes = plan.encoder_passes
        count.calls += len(passes) > 1
        return original(self, replace(plan, encoder_passes=_begun_together(passes)), *args, **kwargs)

    with mock.patch.object(ReplayState, "inputs", inputs):
        yield count


def _begun_together(passes: tuple[EncoderPass, ...]) -> tuple[EncoderPass, ...]:
    """The n-th piece of every request in the n-th pass."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for one in passes:
        for request in sorted(set(one.requests.tolist())):
            rows = one.requests == request
            columns = ("source_rows", "requests", "positions", "floors")
            parts.setdefault(request, []).append({name: getattr(one, name)[rows] for name in columns})
    longest = max((len(part) for part in parts.values()), default=0)
    together = [[part[n] for _, part in sorted(parts.items()) if n < len(part)] for n in range(longest)]
    return tuple(
        EncoderPass(**{name: np.concatenate([p[name] for p in group]) for name in group[0]}) for group in together
    )
