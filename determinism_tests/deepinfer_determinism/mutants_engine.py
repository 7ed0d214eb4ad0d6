"""Planted faults between the model, the scheduler's decisions and the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from deepinfer_determinism.mutants import Mutant, changed
from deepinfer_determinism.patching import Function
from deepinfer_plugin.engine_child.faults import Calls

_KERNELS = "deepinfer_kernels"
_TILED = f"{_KERNELS}.row_tiles:tiled_matmul"
_SAMPLE = "deepinfer_plugin.sampling.sampler:sample_tokens"
_STEP = "deepinfer_plugin.model.step:Step"
Fault = Callable[[], AbstractContextManager[Calls]]


def _arguments_changed(
    path: str, alter: Callable[[Calls, list[Any], dict[str, Any]], None]
) -> AbstractContextManager[Calls]:
    """Let ``alter(calls, args, kwargs)`` change the arguments in place before every call of a function."""

    def change(original: Function, calls: Calls) -> Function:
        def altered(*args: Any, **kwargs: Any) -> Any:
            values = list(args)
            alter(calls, values, kwargs)
            return original(*values, **kwargs)

        return altered

    return changed(path, change)


def _first_rows(req_idx: torch.Tensor) -> torch.Tensor:
    """[num_tokens] index of the first row of each row's request; rows of a request are neighbours."""
    starts = torch.ones_like(req_idx, dtype=torch.bool)
    starts[1:] = req_idx[1:] != req_idx[:-1]
    return torch.where(starts, torch.arange(len(req_idx)), 0).cummax(dim=0).values


def _halves(original: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product with its depth split in two."""
    half = x.shape[1] // 2
    return original(x[:, :half], w[:, :half]) + original(x[:, half:], w[:, half:])  # type: ignore[no-any-return]


def another_order_from_64_rows() -> AbstractContextManager[Calls]:
    """Steps of 64 and more rows take a tile whose depth is summed in another order."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            calls.calls += x.shape[0] >= 64
            return _halves(original, x, w) if x.shape[0] >= 64 else original(x, w)

        return product

    return changed(_TILED, change)


def decode_has_its_own_kernel() -> AbstractContextManager[Calls]:
    """Products of up to four rows, a decode step, are summed in another order."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            calls.calls += x.shape[0] <= 4
            return _halves(original, x, w) if x.shape[0] <= 4 else original(x, w)

        return product

    return changed(_TILED, change)


def seed_of_the_first_request() -> AbstractContextManager[Calls]:
    """All requests of a step draw with the seed and the prompt hash of the first."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        calls.calls += len(args[2]) > 1
        args[2], args[3] = args[2][:1].expand_as(args[2]).contiguous(), args[3][:1].expand_as(args[3]).contiguous()

    return _arguments_changed(_SAMPLE, alter)


def seed_plus_row() -> AbstractContextManager[Calls]:
    """The row in the batch goes into the noise."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        calls.calls += len(args[2]) > 1
        args[2] = args[2] + torch.arange(len(args[2]))

    return _arguments_changed(_SAMPLE, alter)


def noise_keyed_by_step() -> AbstractContextManager[Calls]:
    """The engine's step goes into the noise in the place of the position."""
    steps = [0]

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        calls.calls += 1
        steps[0] += 1
        args[4] = torch.full_like(args[4], steps[0])

    return _arguments_changed(_SAMPLE, alter)


def temperature_of_a_neighbour() -> AbstractContextManager[Calls]:
    """A row is greedy or drawn as the row before it is."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        calls.calls += len(args[1]) > 1
        args[1] = args[1].roll(1)

    return _arguments_changed(_SAMPLE, alter)


def prompt_hash_of_the_last_owner() -> AbstractContextManager[Calls]:
    """A slot keeps the prompt hash of the first request that it held."""

    def change(original: Function, calls: Calls) -> Function:
        seen: set[int] = set()

        def set_prompt(self: Any, req_idx: int, tokens: Any) -> None:
            if req_idx in seen:
                calls.calls += 1
                return
            seen.add(req_idx)
            original(self, req_idx, tokens)

        return set_prompt

    return changed("deepinfer_plugin.sampling.sampler:DeepInferSampler.set_prompt", change)


def position_off_by_one_after_preemption() -> AbstractContextManager[Calls]:
    """A request that comes a second time under its id draws as if it stood one position further."""
    slots: dict[int, str] = {}
    seen: set[str] = set()
    resumed: set[int] = set()

    def change(original: Function, calls: Calls) -> Function:
        def add_request(self: Any, req_index: int, data: Any) -> None:
            original(self, req_index, data)
            slots[req_index] = data.req_id
            (resumed.add if data.req_id in seen else resumed.discard)(req_index)
            seen.add(data.req_id)

        return add_request

    def change_sample(original: Function, calls: Calls) -> Function:
        def sample(self: Any, logits: Any, expanded: torch.Tensor, idx: Any, idx_np: Any, pos: Any, *rest: Any) -> Any:
            is_resumed = torch.tensor([int(slot) in resumed for slot in expanded.tolist()])
            calls.calls += int(is_resumed.sum())
            return original(self, logits, expanded, idx, idx_np, pos + is_resumed.to(pos.dtype), *rest)

        return sample

    return _both(
        changed("deepinfer_plugin.worker.model_state:DeepInferModelState.add_request", change),
        changed("deepinfer_plugin.sampling.sampler:DeepInferSampler.sample", change_sample),
    )


def logprobs_by_what_is_asked() -> AbstractContextManager[Calls]:
    """Few log-probabilities asked for: the library's log-softmax of the step; all: ours."""

    def change(original: Function, calls: Calls) -> Function:
        def score(logits: torch.Tensor, ids: torch.Tensor, num_top: int, **kwargs: Any) -> Any:
            if num_top >= logits.shape[1] or kwargs["is_logits"]:
                return original(logits, ids, num_top, **kwargs)
            calls.calls += 1
            return original(
                torch.log_softmax(logits.double(), dim=1).float(), ids, num_top, **{**kwargs, "is_logits": True}
            )

        return score

    return changed("deepinfer_plugin.sampling.logprobs:score_rows", change)


def ring_lost_at_chunk_borders() -> AbstractContextManager[Calls]:
    """The even token of a pair that was computed in an earlier step counts as zeros."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        latent, score, positions, req_idx, state = args[:5]
        is_first = _first_rows(req_idx) == torch.arange(len(req_idx))
        lost = is_first & (positions % 2 == 1)
        calls.calls += int(lost.sum())
        blocks = args[5][req_idx[lost].long()].long()
        state[blocks, (positions[lost] - 1) % state.shape[1]] = 0.0
        del latent, score

    return _arguments_changed(f"{_KERNELS}.kv_compress.reference:compress_pairs_reference", alter)


def ring_of_another_request() -> AbstractContextManager[Calls]:
    """Rings of two requests of a step are exchanged."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        calls.calls += len(args[5]) > 1
        args[5] = args[5].roll(1)

    return _arguments_changed(f"{_KERNELS}.kv_compress.reference:compress_pairs_reference", alter)


def stale_window_slot() -> AbstractContextManager[Calls]:
    """The oldest window slot of later requests of a step is the one that the ring held a window ago."""

    def change(original: Function, calls: Calls) -> Function:
        def slots(positions: torch.Tensor, req_idx: torch.Tensor, *args: Any) -> torch.Tensor:
            found: torch.Tensor = original(positions, req_idx, *args)
            stale = (req_idx > 0) & (positions >= found.shape[1])
            calls.calls += int(stale.sum())
            found[stale, 0] = found[stale, 1]
            return found

        return slots

    return changed(f"{_KERNELS}.swa_indices.reference:window_slots_reference", change)


def mask_missing_in_later_requests() -> AbstractContextManager[Calls]:
    """Rows of all requests but the first of a step see as many entries as the longest context has."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        is_later = (args[4] > 0) & (args[5] < args[6])
        calls.calls += int(is_later.sum())
        args[5] = torch.where(is_later, args[6], args[5])

    def unbounded(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        del args[2:]  # the selection has a bound of its own, which would hide the fault

    @contextmanager
    def planted() -> Iterator[Calls]:
        with (
            _arguments_changed(f"{_KERNELS}.indexer_topk.reference:topk_indices_reference", unbounded),
            _arguments_changed(f"{_KERNELS}.indexer_logits.reference:indexer_logits_reference", alter) as calls,
        ):
            yield calls

    return planted()


def visible_off_by_one_beside_longer_ones() -> AbstractContextManager[Calls]:
    """A row that is shorter than the longest context sees one entry too few."""

    def alter(calls: Calls, args: list[Any], kwargs: dict[str, Any]) -> None:
        shorter = (args[5] < args[5].max()) & (args[5] > 1)
        calls.calls += int(shorter.sum())
        args[5] = args[5] - shorter.to(args[5].dtype)

    return _arguments_changed(f"{_KERNELS}.indexer_logits.reference:indexer_logits_reference", alter)


def candidates_of_a_neighbour() -> AbstractContextManager[Calls]:
    """Candidate blocks are those of the row before in the step."""

    def change(original: Function, calls: Calls) -> Function:
        def blocks(*args: Any) -> torch.Tensor:
            found = original(*args)
            calls.calls += len(found) > 1
            return found.roll(1, 0)  # type: ignore[no-any-return]

        return blocks

    return changed(f"{_KERNELS}.indexer_topk.reference:candidate_blocks_reference", change)


def another_kernel_behind_a_hit() -> AbstractContextManager[Calls]:
    """Rows of a prompt whose first part was cached are rotated with angles in bf16."""

    def change(original: Function, calls: Calls) -> Function:
        def rotated(self: Any, *args: Any) -> Any:
            rotation = original(self, *args)
            first = _first_rows(self.req_idx)
            behind = (first != torch.arange(len(first))) & (self.positions[first] > 0)
            calls.calls += int(behind.sum())
            rotation.cos[behind] = rotation.cos[behind].bfloat16().float()
            return rotation

        return rotated

    return changed(f"{_STEP}._rotation", change)


def positions_of_the_chunk() -> AbstractContextManager[Calls]:
    """Rotations count from the first row of a chunk that has several rows."""

    def change(original: Function, calls: Calls) -> Function:
        def rotated(self: Any, positions: torch.Tensor, *args: Any) -> Any:
            first = _first_rows(self.req_idx)
            is_alone = torch.bincount(self.req_idx)[self.req_idx.long()] == 1
            calls.calls += int(((self.positions[first] > 0) & ~is_alone).sum())
            return original(
                self, torch.where(is_alone, positions, positions - self.positions[first]).clamp_min(0), *args
            )

        return rotated

    return changed(f"{_STEP}._rotation", change)


def lookback_lost_at_chunk_borders() -> AbstractContextManager[Calls]:
    """Engram sees only tokens of the current chunk."""

    def change(original: Function, calls: Calls) -> Function:
        def lookback(input_ids: Any, positions: torch.Tensor, query_start_loc: torch.Tensor, *args: Any) -> Any:
            found = original(input_ids, positions, query_start_loc, *args)
            row_in_step = _rows_in_step(positions, query_start_loc)
            lost = (torch.arange(1, found.shape[1] + 1) > row_in_step[:, None]) & (found >= 0)
            calls.calls += int(lost.sum())
            return torch.where(lost, -1, found)

        return lookback

    return changed("deepinfer_plugin.worker.model_state:lookback_ids", change)


def lookback_into_a_neighbour() -> AbstractContextManager[Calls]:
    """The predecessor of a request's first row in a step is the row before, of another request."""

    def change(original: Function, calls: Calls) -> Function:
        def lookback(
            input_ids: torch.Tensor, positions: torch.Tensor, query_start_loc: torch.Tensor, *args: Any
        ) -> Any:
            found = original(input_ids, positions, query_start_loc, *args)
            first = _rows_in_step(positions, query_start_loc) == 0
            first[0] = False
            calls.calls += int(first.sum())
            found[first, 0] = input_ids.roll(1)[first].to(found.dtype)
            return found

        return lookback

    return changed("deepinfer_plugin.worker.model_state:lookback_ids", change)


def _rows_in_step(positions: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(positions))
    ends = query_start_loc[1:]
    request = torch.searchsorted(ends, rows.to(ends.dtype), right=True).clamp_max_(len(ends) - 1)
    return rows - query_start_loc[request].long()


def experts_in_order_of_arrival() -> AbstractContextManager[Calls]:
    """Every second row of a step adds its shared expert first and the routed ones from the last on."""

    def change(original: Function, calls: Calls) -> Function:
        def combine(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            total = shared.float()
            for slot in reversed(range(routed.shape[1])):
                total = total + routed[:, slot]
            is_odd = torch.arange(len(routed)) % 2 == 1
            calls.calls += int(is_odd.sum())
            return torch.where(is_odd[:, None], total.to(shared.dtype), original(routed, shared))

        return combine

    return changed(f"{_KERNELS}.moe_combine.reference:moe_combine_reference", change)


def nan_in_a_large_step() -> AbstractContextManager[Calls]:
    """The last row of a step of 20 and more requests reads memory that nobody wrote."""

    def change(original: Function, calls: Calls) -> Function:
        def process(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if logits.shape[0] >= 20:
                calls.calls += 1
                logits[-1] = float("nan")
            return original(self, logits, *args, **kwargs)

        return process

    return changed("deepinfer_plugin.sampling.sampler:DeepInferSampler.sample", change)


def cached_page_of_a_neighbour() -> AbstractContextManager[Calls]:
    """Entries behind a page edge are read from the table of the request before."""

    def change(original: Function, calls: Calls) -> Function:
        def slots(indices: torch.Tensor, req_idx: torch.Tensor, table: torch.Tensor, per_block: int) -> torch.Tensor:
            found: torch.Tensor = original(indices, req_idx, table, per_block)
            other = original(indices, (req_idx - 1).clamp_min(0), table, per_block)
            at_edge = (indices >= 0) & (indices % per_block == 0) & (indices > 0)
            calls.calls += int((at_edge & (found != other)).sum())
            return torch.where(at_edge & (other > 0), other, found)

        return slots

    return changed(f"{_KERNELS}.swa_indices.reference:entry_slots_reference", change)


def _both(*contexts: AbstractContextManager[Calls]) -> AbstractContextManager[Calls]:
    """Enter all; the last one counts."""
    return _Both(contexts)


class _Both(AbstractContextManager[Calls]):
    def __init__(self, contexts: tuple[AbstractContextManager[Calls], ...]) -> None:
        self._contexts = contexts

    def __enter__(self) -> Calls:
        return [context.__enter__() for context in self._contexts][-1]

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


_OF = "deepinfer_determinism.mutants_engine"


def _mutant(fault: Fault, relation: str, engine: str) -> Mutant:
    what = (fault.__doc__ or "").strip()
    name = fault.__name__
    return Mutant(name=name, what=what, fault=f"{_OF}:{name}", relation=relation, engine=engine)


ENGINE_MUTANTS: tuple[Mutant, ...] = (
    _mutant(another_order_from_64_rows, "neighbours", "crowd s32"),
    _mutant(decode_has_its_own_kernel, "decode", "decode"),
    _mutant(seed_of_the_first_request, "neighbours", "crowd"),
    _mutant(seed_plus_row, "slot", "crowd"),
    _mutant(noise_keyed_by_step, "arrival", "arrival"),
    _mutant(temperature_of_a_neighbour, "parameters", "crowd"),
    _mutant(prompt_hash_of_the_last_owner, "slot", "crowd"),
    _mutant(position_off_by_one_after_preemption, "preemption", "preemption"),
    _mutant(logprobs_by_what_is_asked, "logprobs", "logprobs"),
    _mutant(ring_lost_at_chunk_borders, "chunks", "chunks"),
    _mutant(ring_of_another_request, "canaries", "chunks"),
    _mutant(stale_window_slot, "order", "crowd"),
    _mutant(mask_missing_in_later_requests, "lengths", "crowd"),
    _mutant(visible_off_by_one_beside_longer_ones, "lengths", "crowd"),
    _mutant(candidates_of_a_neighbour, "neighbours", "crowd"),
    _mutant(another_kernel_behind_a_hit, "cache hit", "cache"),
    _mutant(positions_of_the_chunk, "chunks", "chunks"),
    _mutant(lookback_lost_at_chunk_borders, "chunks", "chunks"),
    _mutant(lookback_into_a_neighbour, "neighbours", "crowd"),
    _mutant(experts_in_order_of_arrival, "order", "crowd s32"),
    _mutant(nan_in_a_large_step, "copies", "copies"),
    _mutant(cached_page_of_a_neighbour, "canaries", "crowd"),
)
