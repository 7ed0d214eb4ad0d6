"""Planted faults inside single operations. Each is what a plausible fast kernel does wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from deepinfer_determinism.mutants import Mutant, changed
from deepinfer_determinism.patching import Function
from deepinfer_kernels import tiling
from deepinfer_kernels.pointwise import sigmoid
from deepinfer_plugin.engine_child.faults import Calls

ROW_TILE = tiling.REFERENCE_ROW_TILE
_KERNELS = "deepinfer_kernels"
_TILED = f"{_KERNELS}.row_tiles:tiled_matmul"
Fault = Callable[[], AbstractContextManager[Calls]]


def _reference(folder: str, function: str = "") -> str:
    return f"{_KERNELS}.{folder}.reference:{function or folder}_reference"


def split_k_by_rows() -> AbstractContextManager[Calls]:
    """Few rows: the depth is split in two halves that are added at the end."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if x.shape[0] >= ROW_TILE:
                return original(x, w)  # type: ignore[no-any-return]
            calls.calls += 1
            half = x.shape[1] // 2
            return original(x[:, :half], w[:, :half]) + original(x[:, half:], w[:, half:])  # type: ignore[no-any-return]

        return product

    return changed(_TILED, change)


def tile_outside_the_family() -> AbstractContextManager[Calls]:
    """All rows in one product: the library chooses its kernel by their number."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            calls.calls += 1
            return x @ w.t()

        return product

    return changed(_TILED, change)


def last_tile_not_padded() -> AbstractContextManager[Calls]:
    """Whole tiles are right; the rows of the rest are multiplied as they are."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            whole = x.shape[0] // ROW_TILE * ROW_TILE
            if whole == x.shape[0]:
                return original(x, w)  # type: ignore[no-any-return]
            calls.calls += 1
            rest = x[whole:] @ w.t()
            return torch.cat([original(x[:whole], w), rest]) if whole else rest

        return product

    return changed(_TILED, change)


def padded_rows_leak() -> AbstractContextManager[Calls]:
    """The rows that fill a tile are never cleared, and the tile is scaled by its largest value."""

    def change(original: Function, calls: Calls) -> Function:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            missing = -x.shape[0] % ROW_TILE
            calls.calls += missing > 0
            tile = torch.cat([x, torch.empty(missing, x.shape[1])])
            largest = tile.abs().amax()
            return original(tile / largest, w)[: x.shape[0]] * largest  # type: ignore[no-any-return]

        return product

    return changed(_TILED, change)


def stale_output_buffer() -> AbstractContextManager[Calls]:
    """One output buffer for all calls, handed out before its reader is done: what a missing barrier gives."""

    def change(original: Function, calls: Calls) -> Function:
        buffers: dict[int, torch.Tensor] = {}

        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            result = original(x, w)
            buffer = buffers.setdefault(w.shape[0], torch.zeros(4096, w.shape[0]))
            calls.calls += 1
            buffer[: x.shape[0]] = result
            return buffer[: x.shape[0]]

        return product

    return changed(_TILED, change)


def expert_rows_not_tiled() -> AbstractContextManager[Calls]:
    """Rows of an expert are multiplied in one product of as many rows as the batch sends to it."""

    def change(original: Function, calls: Calls) -> Function:
        def grouped(x: torch.Tensor, weight_of: Any, counts: list[int]) -> torch.Tensor:
            calls.calls += 1
            parts = torch.split(x, counts)
            return torch.cat([part @ weight_of(expert).t() for expert, part in enumerate(parts) if len(part) > 0])

        return grouped

    return changed(f"{_KERNELS}.moe_experts.reference:_grouped_matmul", change)


def _rows_changed(
    path: str, argument: int, when: Callable[[int], bool], repair: Function
) -> AbstractContextManager[Calls]:
    """Pass the result through ``repair(result, *args)`` in calls whose number of rows ``when`` says."""

    def change(original: Function, calls: Calls) -> Function:
        def altered(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not when(args[argument].shape[0]):
                return result
            calls.calls += 1
            return repair(result, *args)

        return altered

    return changed(path, change)


def nan_times_zero() -> AbstractContextManager[Calls]:
    """Rows are masked by a product with zero, which keeps the NaN of a neighbour."""
    return _rows_changed(
        _reference("rms_norm"), 0, lambda rows: rows > 1, lambda out, *_: out + 0.0 * out.sum(dim=0, keepdim=True)
    )


def rows_never_written() -> AbstractContextManager[Calls]:
    """The grid is too small by one program: the last row of a large call keeps what the memory held."""

    def repair(out: torch.Tensor, *_: Any) -> torch.Tensor:
        fresh = torch.empty_like(out)
        fresh[:-1] = out[:-1]
        return fresh

    return _rows_changed(_reference("swiglu"), 0, lambda rows: rows > ROW_TILE, repair)


def stride_ignored() -> AbstractContextManager[Calls]:
    """Rows are read as if they lay one behind the other."""

    def change(original: Function, calls: Calls) -> Function:
        def read(streams: torch.Tensor, *args: Any) -> Any:
            if not streams.is_contiguous():
                calls.calls += 1
                dense = streams.stride()[1:]
                streams = streams.as_strided(streams.shape, (streams[0].numel(), *dense))
            return original(streams, *args)

        return read

    return changed(_reference("hc_collapse"), change)


def scale_shared_by_the_call() -> AbstractContextManager[Calls]:
    """Quantisation takes the largest value of all rows of the call, as a per-tensor FP8 scale does."""

    def change(original: Function, calls: Calls) -> Function:
        def quantised(x: torch.Tensor) -> Any:
            calls.calls += 1
            largest = x.abs().amax().clamp_min(1e-4)
            return original(x / largest) * largest

        return quantised

    return changed(_reference("mxfp8_quant", "mxfp8_fake_quant"), change)


def ties_by_the_library() -> AbstractContextManager[Calls]:
    """torch.topk on the scores themselves: which of two equal entries wins follows the width of the call."""

    def change(original: Function, calls: Calls) -> Function:
        def topk(scores: torch.Tensor, k: int, *_: Any) -> torch.Tensor:
            calls.calls += 1
            best, index = torch.topk(scores, min(k, scores.shape[1]), dim=1, sorted=False)
            index = index.masked_fill(best == -torch.inf, 1 << 30).sort(dim=1).values
            chosen = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
            chosen[:, : index.shape[1]] = torch.where(index == 1 << 30, -1, index).int()
            return chosen

        return topk

    return changed(_reference("indexer_topk", "topk_indices"), change)


def topk_not_sorted() -> AbstractContextManager[Calls]:
    """The right entries in the order in which the batch's algorithm found them."""

    def change(original: Function, calls: Calls) -> Function:
        def topk(scores: torch.Tensor, k: int, *args: Any) -> torch.Tensor:
            chosen = original(scores, k, *args)
            calls.calls += 1
            return chosen.roll(scores.shape[1] % k, dims=1)  # type: ignore[no-any-return]

        return topk

    return changed(_reference("indexer_topk", "topk_indices"), change)


def candidates_of_the_row_before() -> AbstractContextManager[Calls]:
    """Rows share candidate blocks in pairs."""
    return _rows_changed(
        _reference("indexer_topk", "candidate_blocks"),
        0,
        lambda rows: rows > 1,
        lambda blocks, *_: torch.cat([blocks[:1], blocks[:-1]]),
    )


def list_cut_at_the_longest_row() -> AbstractContextManager[Calls]:
    """Attention lists are cut to the longest one of the batch, and the products with them."""

    def change(original: Function, calls: Calls) -> Function:
        def attend(q: torch.Tensor, parts: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            calls.calls += 1
            longest = [max(1, int((part.slots >= 0).sum(dim=1).max())) for part in parts]
            cut = [dataclasses.replace(p, slots=p.slots[:, :n]) for p, n in zip(parts, longest, strict=True)]
            return original(q, cut, *args, **kwargs)  # type: ignore[no-any-return]

        return attend

    return changed(_reference("sparse_attention"), change)


def split_kv_for_few_rows() -> AbstractContextManager[Calls]:
    """Few rows: key blocks are half as long, so that more programs have work."""

    def change(original: Function, calls: Calls) -> Function:
        def attend(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if q.shape[0] >= ROW_TILE:
                return original(q, *args, **kwargs)  # type: ignore[no-any-return]
            calls.calls += 1
            with mock.patch.object(tiling, "REFERENCE_KEY_TILE", tiling.REFERENCE_KEY_TILE // 2):
                return original(q, *args, **kwargs)  # type: ignore[no-any-return]

        return attend

    return changed(_reference("sparse_attention"), change)


def combine_order_by_rows() -> AbstractContextManager[Calls]:
    """Many rows: experts are added from the last to the first."""

    def change(original: Function, calls: Calls) -> Function:
        def combine(routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            if routed.shape[0] < ROW_TILE:
                return original(routed, shared)  # type: ignore[no-any-return]
            calls.calls += 1
            return original(routed.flip(1), shared)  # type: ignore[no-any-return]

        return combine

    return changed(_reference("moe_combine"), change)


def router_balances_the_batch() -> AbstractContextManager[Calls]:
    """The bias of an expert falls with the rows that want it."""

    def change(original: Function, calls: Calls) -> Function:
        def route(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **kwargs: Any) -> Any:
            chosen, _ = original(x, weight, bias, **kwargs)
            calls.calls += 1
            load = torch.bincount(chosen.flatten().long(), minlength=len(bias)).float() / len(x)
            return original(x, weight, bias - 0.2 * load, **kwargs)

        return route

    return changed(_reference("moe_gate"), change)


def maximum_of_the_call() -> AbstractContextManager[Calls]:
    """Log-softmax subtracts the largest logit of all rows."""

    def change(original: Function, calls: Calls) -> Function:
        def largest_and_log_sum(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.calls += 1
            largest = logits.nan_to_num(nan=-torch.inf).amax()
            log_sum = (logits - largest).exp().sum(dim=1, keepdim=True).log()
            return largest.expand(len(logits), 1), log_sum

        return largest_and_log_sum

    return changed(f"{_KERNELS}.log_softmax.reference:_largest_and_log_sum", change)


def noise_from_one_stream() -> AbstractContextManager[Calls]:
    """Noise is drawn row after row from one generator, as a stock sampler does."""

    def change(original: Function, calls: Calls) -> Function:
        def noise(seeds: torch.Tensor, prompt_hashes: torch.Tensor, positions: torch.Tensor, size: int) -> Any:
            calls.calls += 1
            return original(seeds, prompt_hashes, positions + torch.arange(len(positions)), size)

        return noise

    return changed(_reference("sampling_noise", "gumbel_noise"), change)


def narrowest_top_k_of_the_call() -> AbstractContextManager[Calls]:
    """Every row is cut to the least top-k of the batch."""

    def change(original: Function, calls: Calls) -> Function:
        def restrict(logits: torch.Tensor, top_k: torch.Tensor, *args: Any) -> Any:
            calls.calls += 1
            least = torch.where(top_k > 0, top_k, logits.shape[1]).min()
            return original(logits, least.expand(len(top_k)).contiguous(), *args)

        return restrict

    return changed(_reference("restrict_logits"), change)


def pair_across_requests() -> AbstractContextManager[Calls]:
    """The even token of a pair is the row before, whichever request it belongs to."""

    def change(original: Function, calls: Calls) -> Function:
        def compress(
            latent: torch.Tensor, score: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            out = original(latent, score, positions, *args, **kwargs)
            odd = (positions % 2 == 1).nonzero().flatten()
            odd = odd[odd > 0]
            calls.calls += len(odd)
            weight = torch.stack([score[odd - 1], score[odd]]).softmax(dim=0)
            out[odd] = (weight * torch.stack([latent[odd - 1], latent[odd]])).sum(dim=0).to(out.dtype)
            return out

        return compress

    return changed(_reference("kv_compress", "compress_pairs"), change)


def slot_of_the_next_page() -> AbstractContextManager[Calls]:
    """The first slot of a page is taken from the next request's table in calls of several rows."""

    def change(original: Function, calls: Calls) -> Function:
        def slots(
            entries: torch.Tensor, is_none: Any, req_idx: torch.Tensor, table: torch.Tensor, per_block: int
        ) -> Any:
            found = original(entries, is_none, req_idx, table, per_block)
            if len(entries) == 1:
                return found
            other = original(entries, is_none, (req_idx + 1) % len(table), table, per_block)
            at_edge = (entries % per_block == 0) & ~is_none
            calls.calls += int(at_edge.sum())
            return torch.where(at_edge, other, found)

        return slots

    return changed(f"{_KERNELS}.swa_indices.reference:_slots", change)


def hash_of_the_row_before() -> AbstractContextManager[Calls]:
    """The oldest token of an n-gram comes from the row before in the call."""

    def change(original: Function, calls: Calls) -> Function:
        def rows(ids: torch.Tensor, *args: Any) -> Any:
            if len(ids) > 1:
                calls.calls += 1
                ids = torch.cat([ids[:, :-1], ids[:, -1:].roll(1, 0)], dim=1)
            return original(ids, *args)

        return rows

    return changed(_reference("engram_hash", "engram_rows"), change)


def positions_from_the_first_row() -> AbstractContextManager[Calls]:
    """Angles are those of positions that start at 0 in every call."""

    def change(original: Function, calls: Calls) -> Function:
        def tables(positions: torch.Tensor, frequencies: torch.Tensor) -> Any:
            calls.calls += 1
            return original(positions - positions[:1], frequencies)

        return tables

    return changed(_reference("rope", "cos_sin"), change)


def sinkhorn_stops_early() -> AbstractContextManager[Calls]:
    """Fewer iterations where the call has many rows."""

    def change(original: Function, calls: Calls) -> Function:
        def sinkhorn(logits: torch.Tensor, scale: Any, base: Any, streams: int, iters: int, eps: float) -> Any:
            if len(logits) > ROW_TILE:
                calls.calls += 1
                iters -= 1
            return original(logits, scale, base, streams, iters, eps)

        return sinkhorn

    return changed(_reference("hc_sinkhorn"), change)


def record_scale_of_the_neighbour() -> AbstractContextManager[Calls]:
    """The last record of a call gets the scales of the one before."""

    def change(original: Function, calls: Calls) -> Function:
        def encode(x: torch.Tensor, fmt: Any) -> Any:
            values, scales = original(x, fmt)
            if len(x) > 1:
                calls.calls += 1
                scales = torch.cat([scales[:-1], scales[-2:-1]])
            return values, scales

        return encode

    return changed(f"{_KERNELS}.kv_store.reference:_encode", change)


def gate_summed_by_a_product() -> AbstractContextManager[Calls]:
    """Many rows: the gate's sums are batched products, whose order is the library's."""

    def change(original: Function, calls: Calls) -> Function:
        def gate(streams: Any, key: Any, value: Any, q_weight: Any, k_weight: Any, eps: float, is_image: Any) -> Any:
            if len(streams) <= ROW_TILE:
                return original(streams, key, value, q_weight, k_weight, eps, is_image)
            calls.calls += 1
            x, k = streams.float(), key.float()
            dot = torch.einsum("tsd,tsd->ts", x * (q_weight.float() * k_weight.float()), k)
            square = torch.einsum("tsd,tsd->ts", x, x), torch.einsum("tsd,tsd->ts", k, k)
            width = x.shape[-1]
            rstd = torch.rsqrt(square[0] / width + eps) * torch.rsqrt(square[1] / width + eps)
            u = dot * rstd * width**-0.5
            opened = sigmoid(torch.copysign(u.abs().clamp_min(1e-6).sqrt(), u))
            return (x + opened[:, :, None] * value.float()[:, None, :]).to(streams.dtype)

        return gate

    return changed(_reference("engram_gate"), change)


_OF = "deepinfer_determinism.mutants_operations"


def _mutant(fault: Fault, operation: str, variant: str = "") -> Mutant:
    what = (fault.__doc__ or "").strip()
    name = fault.__name__
    return Mutant(name=name, what=what, fault=f"{_OF}:{name}", operation=operation, variant=variant)


OPERATION_MUTANTS: tuple[Mutant, ...] = (
    _mutant(split_k_by_rows, "linear.linear", "even"),
    _mutant(tile_outside_the_family, "hc_mix.hc_mix"),
    _mutant(last_tile_not_padded, "linear.mxfp8_linear", "exact"),
    _mutant(padded_rows_leak, "linear.grouped_linear"),
    _mutant(stale_output_buffer, "linear.linear", "even"),
    _mutant(expert_rows_not_tiled, "moe_experts.moe_experts", "crowded"),
    _mutant(nan_times_zero, "rms_norm.rms_norm"),
    _mutant(rows_never_written, "swiglu.swiglu", "plain"),
    _mutant(stride_ignored, "hc_collapse.hc_collapse"),
    _mutant(scale_shared_by_the_call, "linear.mxfp8_linear", "quantised"),
    _mutant(ties_by_the_library, "indexer_topk.topk_indices"),
    _mutant(topk_not_sorted, "indexer_topk.topk_indices"),
    _mutant(candidates_of_the_row_before, "indexer_topk.candidate_blocks"),
    _mutant(list_cut_at_the_longest_row, "sparse_attention.sparse_attention", "long"),
    _mutant(split_kv_for_few_rows, "sparse_attention.sparse_attention", "long"),
    _mutant(combine_order_by_rows, "moe_combine.moe_combine"),
    _mutant(router_balances_the_batch, "moe_gate.moe_gate"),
    _mutant(maximum_of_the_call, "log_softmax.log_softmax"),
    _mutant(noise_from_one_stream, "sample_tokens.sample_tokens"),
    _mutant(narrowest_top_k_of_the_call, "restrict_logits.restrict_logits"),
    _mutant(pair_across_requests, "kv_compress.compress_pairs"),
    _mutant(slot_of_the_next_page, "swa_indices.window_slots"),
    _mutant(hash_of_the_row_before, "engram_hash.engram_rows"),
    _mutant(positions_from_the_first_row, "rope.cos_sin"),
    _mutant(sinkhorn_stops_early, "hc_sinkhorn.hc_sinkhorn"),
    _mutant(record_scale_of_the_neighbour, "kv_store.store_records", "NVFP4"),
    _mutant(gate_summed_by_a_product, "engram_gate.engram_gate", "text"),
)


@contextmanager
def nothing() -> Iterator[Calls]:
    """The control: no fault, so nothing may be caught."""
    yield Calls(calls=1)
