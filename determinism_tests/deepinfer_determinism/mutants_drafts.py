"""Planted faults of verification and of what a rejected draft leaves behind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from deepinfer_determinism.mutants import Mutant, changed
from deepinfer_determinism.patching import Function
from deepinfer_plugin.engine_child.faults import Calls

RELATION = "drafts"
ENGINE = "drafts"
_PAIRS = "deepinfer_kernels.kv_compress:compress_pairs"


def accepts_an_unequal_draft() -> AbstractContextManager[Calls]:
    """The first draft that differs stands in the place of what was drawn."""

    def change(original: Function, calls: Calls) -> Function:
        def accepted(sampled: torch.Tensor, read: torch.Tensor, starts: torch.Tensor, *rest: Any) -> Any:
            tokens, num_kept = original(sampled, read, starts, *rest)
            for request, (first, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
                kept = int(num_kept[request])
                if kept < end - first:
                    calls.calls += 1
                    tokens[request, kept - 1] = read[first + kept]
                    num_kept[request] = kept + 1
            return tokens, num_kept

        return accepted

    return changed("deepinfer_plugin.speculative.drafts:accepted_prefix", change)


def keeps_right_drafts_after_a_wrong_one() -> AbstractContextManager[Calls]:
    """All matches are counted, not those before the first mismatch."""

    def change(original: Function, calls: Calls) -> Function:
        def accepted(sampled: torch.Tensor, read: torch.Tensor, starts: torch.Tensor, *rest: Any) -> Any:
            tokens, num_kept = original(sampled, read, starts, *rest)
            for request, (first, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
                matches = 1 + int((read[first + 1 : end] == sampled[first : end - 1]).sum())
                longer = min(end - first, matches + 1)
                calls.calls += longer > int(num_kept[request])
                num_kept[request] = longer
            return tokens, num_kept

        return accepted

    return changed("deepinfer_plugin.speculative.drafts:accepted_prefix", change)


def bonus_token_one_position_late() -> AbstractContextManager[Calls]:
    """The last verified row draws with the noise of the position after its own."""

    def change(original: Function, calls: Calls) -> Function:
        def sample(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values = list(args)
            local = values[5]  # expanded_local_pos
            is_last = torch.ones_like(local, dtype=torch.bool)
            is_last[:-1] = local[1:] == 0
            moved = is_last & (local > 0)
            calls.calls += int(moved.sum())
            values[3] = values[3] + moved
            return original(self, logits, *values, **kwargs)

        return sample

    return changed("deepinfer_plugin.sampling.sampler:DeepInferSampler.sample", change)


def penalties_count_rejected_drafts() -> AbstractContextManager[Calls]:
    """A draft that does not stand stays in the counts of produced tokens."""

    def change(original: Function, calls: Calls) -> Function:
        def verify(self: Any, logits: torch.Tensor, batch: Any, *args: Any) -> Any:
            output = original(self, logits, batch, *args)
            counts = self._sampler.penalties_state.output_bin_counts
            read = batch.input_ids[batch.logits_indices]
            starts = batch.cu_num_logits.tolist()
            for request, slot in enumerate(batch.idx_mapping.tolist()):
                for row in range(starts[request] + int(output.num_sampled[request]), starts[request + 1]):
                    counts[slot, int(read[row])] += 1
                    calls.calls += 1
            return output

        return verify

    return changed("deepinfer_plugin.speculative.verify:ExactMatchVerifier.__call__", change)


def masks_of_the_first_row_for_all() -> AbstractContextManager[Calls]:
    """Every verified row gets the grammar's mask of the request's first row."""

    def change(original: Function, calls: Calls) -> Function:
        def apply(self: Any, logits: torch.Tensor, batch: Any, ids: Any, bitmask: Any) -> None:
            stride = self.mask_stride
            first = bitmask.reshape(-1, stride, bitmask.shape[1])[:, :1]
            calls.calls += int((bitmask.reshape(-1, stride, bitmask.shape[1]) != first).any())
            original(self, logits, batch, ids, first.repeat(stride, axis=1).reshape(bitmask.shape).copy())

        return apply

    return changed("vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask", change)


def grammar_keeps_rejected_drafts() -> AbstractContextManager[Calls]:
    """The grammar keeps one of the drafts that it has looked at."""

    def no_rollback(original: Function, calls: Calls) -> Function:
        def rollback(self: Any, num_tokens: int) -> None:
            calls.calls += num_tokens > 0
            original(self, max(0, num_tokens - 1))

        return rollback

    return changed("vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar.rollback", no_rollback)


def pair_state_keeps_a_rejected_draft() -> AbstractContextManager[Calls]:
    """A position that the pair ring holds already is not written again."""

    def change(original: Function, calls: Calls) -> Function:
        newest: dict[tuple[int, int], int] = {}

        def compress(
            latent: torch.Tensor,
            score: torch.Tensor,
            positions: torch.Tensor,
            req_idx: torch.Tensor,
            state: torch.Tensor,
            block: torch.Tensor,
            **kwargs: Any,
        ) -> torch.Tensor:
            before = state[block.long()].clone()
            found: torch.Tensor = original(latent, score, positions, req_idx, state, block, **kwargs)
            for request, place in enumerate(block.tolist()):
                key = (state.data_ptr(), place)
                for position in positions[req_idx == request].tolist():
                    slot = position % state.shape[1]
                    if 0 < position <= newest.get(key, -1):
                        calls.calls += 1
                        state[place, slot] = before[request, slot]
                newest[key] = int(max(positions[req_idx == request].tolist(), default=-1))
            return found

        return compress

    return changed(_PAIRS, change)


def window_keeps_a_rejected_draft() -> AbstractContextManager[Calls]:
    """The window record of a position that was written in the last step is not written again."""
    return _kept_once_written("deepinfer_plugin.model.attention")


def entries_keep_a_rejected_draft() -> AbstractContextManager[Calls]:
    """The compressed entry of a position that was written in the last step is not written again (draft_rollback.py)."""
    return _kept_once_written("deepinfer_plugin.model.compressor")


def index_keys_keep_a_rejected_draft() -> AbstractContextManager[Calls]:
    """The index key of a position that was written in the last step is not written again (draft_rollback.py)."""
    return _kept_once_written("deepinfer_plugin.model.indexer")


@contextmanager
def _kept_once_written(module: str) -> Iterator[Calls]:
    """Slots that were written in the last step keep their record; ``module`` stores records of one kind of cache."""
    owner, calls = importlib.import_module(module), Calls()
    original = owner.store_records
    last: dict[int, set[int]] = {}

    def store(cache: torch.Tensor, slots: torch.Tensor, *args: Any) -> Any:
        written = last.get(cache.data_ptr(), set())
        again = torch.tensor([slot in written for slot in slots.tolist()], dtype=torch.bool)
        calls.calls += int(again.sum())
        last[cache.data_ptr()] = {slot for slot in slots.tolist() if slot >= 0}
        return original(cache, slots.masked_fill(again, -1), *args)

    with mock.patch.object(owner, "store_records", store):
        yield calls


_OF = "deepinfer_determinism.mutants_drafts"


def _mutant(fault: Callable[[], AbstractContextManager[Calls]]) -> Mutant:
    name = fault.__name__
    what = (fault.__doc__ or "").strip()
    return Mutant(name=name, what=what, fault=f"{_OF}:{name}", relation=RELATION, engine=ENGINE)


DRAFT_MUTANTS: tuple[Mutant, ...] = tuple(
    _mutant(fault)
    for fault in (
        accepts_an_unequal_draft,
        keeps_right_drafts_after_a_wrong_one,
        bonus_token_one_position_late,
        penalties_count_rejected_drafts,
        masks_of_the_first_row_for_all,
        grammar_keeps_rejected_drafts,
        pair_state_keeps_a_rejected_draft,
        window_keeps_a_rejected_draft,
    )
)
