"""The operations that read or write caches, and those whose width follows the longest context of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deepinfer_determinism.operation_cases import DENSE, operation
from deepinfer_determinism.operation_cases_fused import FUSED
from deepinfer_determinism.operations import Layout, Operation, Outputs, Run, laid_out, rowwise
from deepinfer_kernels import (
    dense_attention,
    indexer_logits,
    indexer_topk,
    kv_compress,
    kv_store,
    lookback_ids,
    sparse_attention,
    swa_indices,
)
from deepinfer_kernels.dense_attention.reference import make_inputs as dense_attention_inputs
from deepinfer_kernels.indexer_logits.reference import make_inputs as indexer_logits_inputs
from deepinfer_kernels.indexer_topk.reference import make_inputs as indexer_topk_inputs
from deepinfer_kernels.kv_compress.reference import make_inputs as kv_compress_inputs
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.lookback_ids.reference import make_inputs as lookback_inputs
from deepinfer_kernels.sparse_attention.reference import make_inputs as sparse_attention_inputs
from deepinfer_kernels.swa_indices.reference import make_inputs as swa_indices_inputs

FP32 = torch.float32
_FORMATS = ("MXFP8", "NVFP4", "MXFP4", "FP32")
_WIDTH, _RING = 64, 4
_KEY_EDGES = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129)


def _records(function: str) -> Operation:
    def build(n: int, variant: str, g: torch.Generator, device: str) -> Run:
        fmt = RecordFormat[variant]
        x = torch.randn(n, _WIDTH, generator=g).to(device)
        if function == "pack_records":
            return rowwise({"x": x}, ("x",), lambda t: kv_store.pack_records(t["x"], fmt))
        packed = kv_store.pack_records(x, fmt)
        return rowwise(
            {"packed": packed}, ("packed",), lambda t: kv_store.unpack_records(t["packed"], _WIDTH, fmt, FP32)
        )

    variants = tuple(name for name in _FORMATS if name != "FP32" or function == "pack_records")
    return Operation(name=f"kv_store.{function}", build=build, variants=variants)


def _store(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    """Rows are stored in slots of their own among those of the batch; what lies in their slots is what counts."""
    fmt = RecordFormat[variant]
    x = torch.randn(n, _WIDTH, generator=g).to(device)
    slots = torch.randperm(2 * n, generator=g)[:n].to(device)
    num_blocks = -(-2 * n // 8)

    def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        kv_cache = torch.full((num_blocks, 8, fmt.record_bytes(_WIDTH)), 0, dtype=torch.uint8, device=device)
        rows, where = tensors["x"], tensors["slots"].clone()
        is_neighbour = rows.isnan().any(dim=1)
        kv_store.store_records(kv_cache, where.masked_fill(is_neighbour, -1), rows, fmt)
        return kv_store.gather_records(kv_cache, where, _WIDTH, fmt, FP32)

    return rowwise({"x": x, "slots": slots}, ("x", "slots"), call)


def _gather(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    fmt = RecordFormat[variant]
    kv_cache = torch.full((6, 8, fmt.record_bytes(_WIDTH)), 255, dtype=torch.uint8, device=device)
    listed = torch.randperm(48, generator=g)[:20].to(device)
    kv_store.store_records(kv_cache, listed, torch.randn(20, _WIDTH, generator=g).to(device), fmt)
    slots = listed[torch.randint(0, 20, (n, 3), generator=g).to(device)]
    slots[:, 2] = torch.where(slots[:, 2] % 3 == 0, -1, slots[:, 2])
    return rowwise(
        {"slots": slots}, ("slots",), lambda t: kv_store.gather_records(kv_cache, t["slots"], _WIDTH, fmt, FP32)
    )


def _compress(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    """Units are requests: chunks of one to nine rows that begin anywhere, in any order of requests."""
    lengths = torch.randint(1, 10, (n,), generator=g).tolist()
    starts = torch.randint(0, 40, (n,), generator=g).tolist()
    inputs = kv_compress_inputs(lengths, starts, _WIDTH, _RING, g, device)
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def run(selection: Sequence[int], layout: Layout) -> Outputs:
        rows = [torch.arange(offsets[unit], offsets[unit + 1]) for unit in selection]
        index = torch.cat(rows).to(device)
        state = inputs["state_cache"][inputs["state_block"].long()[list(selection)]]
        state = torch.cat([torch.full_like(state[:1], float("nan")), state])
        req_idx = torch.cat([torch.full((len(part),), i, dtype=torch.int32) for i, part in enumerate(rows)]).to(device)
        latent, score, positions = (inputs[name][index] for name in ("latent", "score", "positions"))
        strided = Layout(is_strided=layout.is_strided)
        latent, score = laid_out(latent, strided), laid_out(score, strided)
        if layout.has_nan_neighbours:  # padding rows stand at the end and belong to no request
            padding = torch.full_like(latent[:2], float("nan"))
            latent, score = torch.cat([latent, padding]), torch.cat([score, padding])
            positions = torch.cat([positions, positions[:1].expand(len(padding))])
            req_idx = torch.cat([req_idx, torch.full((len(padding),), -1, dtype=torch.int32, device=device)])
        block = torch.arange(1, len(selection) + 1, dtype=torch.int32, device=device)
        out = kv_compress.compress_pairs(latent, score, positions, req_idx, state, block, out_dtype=FP32)
        ends = [0, *torch.tensor([len(part) for part in rows]).cumsum(0).tolist()]
        return [(out[ends[i] : ends[i + 1]], state[i + 1]) for i in range(len(selection))]

    return run


def _index_logits(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    """Rows of several requests; the width of the result follows the longest context of the call."""
    num_reqs = max(1, n // 3)
    lengths = [_KEY_EDGES[int(i)] for i in torch.randint(0, len(_KEY_EDGES), (num_reqs,), generator=g)]
    fmt = RecordFormat.FP32 if variant == "FP32" else RecordFormat.MXFP4
    inputs = indexer_logits_inputs(lengths, 4, 32, fmt, 8, g, device, rows_per_request=-(-n // num_reqs))
    inputs = {name: t[:n] if name in ("q", "weights", "req_idx", "num_visible") else t for name, t in inputs.items()}
    visible = inputs["num_visible"].tolist()

    def run(selection: Sequence[int], layout: Layout) -> Outputs:
        longest = max(1, *(visible[unit] for unit in selection))

        def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return indexer_logits.indexer_logits(
                **tensors, max_entries=longest, fmt=fmt, entries_per_block=8, round_bf16=variant == "rounded"
            )

        results = rowwise(inputs, ("q", "weights", "req_idx", "num_visible"), call)(selection, layout)
        return [(row[: visible[unit]],) for (row,), unit in zip(results, selection, strict=True)]

    return run


def _scored(function: str) -> Operation:
    """Selections from rows of scores that are as wide as the longest context of the call."""

    def build(n: int, variant: str, g: torch.Generator, device: str) -> Run:
        scores = indexer_topk_inputs(n, 130, g, device)
        scores[:, 0] = torch.where(scores[:, 0] == -torch.inf, 0.25, scores[:, 0])
        visible = (scores > -torch.inf).sum(dim=1)
        blocks = indexer_topk.candidate_blocks(scores, visible, 4, 8)
        inputs = {"scores": scores, "visible": visible, "blocks": blocks}

        def run(selection: Sequence[int], layout: Layout) -> Outputs:
            longest = int(visible[list(selection)].max())

            def call(t: Mapping[str, torch.Tensor]) -> torch.Tensor:
                if function == "topk_indices":
                    return indexer_topk.topk_indices(t["scores"], 8)
                if function == "candidate_blocks":
                    return indexer_topk.candidate_blocks(t["scores"], t["visible"], 4, 8)
                return indexer_topk.mask_to_candidates(t["scores"], t["blocks"], 8)

            narrow = {**inputs, "scores": scores[:, :longest]}
            results = rowwise(narrow, ("scores", "visible", "blocks"), call)(selection, layout)
            if function != "mask_to_candidates":
                return results
            return [(row[: int(visible[unit])],) for (row,), unit in zip(results, selection, strict=True)]

        return run

    return Operation(name=f"indexer_topk.{function}", build=build)


def _attention(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    lengths = {"short": (8, 4), "tile": (63, 2), "long": (100, 60)}[variant]
    formats = (RecordFormat.MXFP8, RecordFormat.NVFP4)
    inputs = sparse_attention_inputs(n, 3, 32, lengths, formats, g, device)
    angles = torch.rand(n, 8, generator=g).to(device) * 6
    inputs = {**inputs, "cos": angles.cos(), "sin": angles.sin()}

    def call(t: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sparse_attention.sparse_attention(
            t["q"],
            t["window_cache"],
            t["window_slots"],
            t["compressed_cache"],
            t["compressed_slots"],
            t["sink"],
            32**-0.5,
            window_format=formats[0],
            compressed_format=formats[1],
            round_p=False,
            cos=t["cos"],
            sin=t["sin"],
        )

    return rowwise(inputs, ("q", "window_slots", "compressed_slots", "cos", "sin"), call)


def _window_slots(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    positions, req_idx, table = swa_indices_inputs(n, 3, 5, 8, g, device)
    inputs = {"positions": positions, "req_idx": req_idx, "floor": torch.zeros_like(positions)}
    return rowwise(
        inputs,
        tuple(inputs),
        lambda t: swa_indices.window_slots(t["positions"], t["req_idx"], table, 8, 11, t["floor"]),
    )


def _entry_slots(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    _, req_idx, table = swa_indices_inputs(n, 3, 5, 8, g, device)
    indices = torch.randint(-1, 20, (n, 6), generator=g, dtype=torch.int32).to(device)
    inputs = {"indices": indices, "req_idx": req_idx}
    return rowwise(inputs, tuple(inputs), lambda t: swa_indices.entry_slots(t["indices"], t["req_idx"], table, 4))


def _lookback(n: int, variant: str, g: torch.Generator, device: str) -> Run:
    """Every row a request of its own, at any place of its history."""
    contexts = torch.randint(0, 12, (n,), generator=g).tolist()
    step = {name: value.to(device) for name, value in lookback_inputs([1] * n, contexts, 0, 12, g).items()}
    history = step.pop("all_token_ids")
    del step["query_start_loc"]

    def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        num_rows = len(tensors["positions"])
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        out = torch.empty((num_rows, 3), dtype=torch.int64, device=device)
        ids, positions, slots = (tensors[name] for name in ("input_ids", "positions", "idx_mapping"))
        return lookback_ids.lookback_ids(ids, positions, starts, slots, history, out)

    return rowwise(step, tuple(step), call)


def _dense(n: int, variant: str, g: torch.Generator, device: str) -> tuple[Mapping[str, torch.Tensor], Sequence[str]]:
    """Queries of one image; the variant is the number of its keys."""
    q, k, v = dense_attention_inputs(n, int(variant), 3, 32, FP32, g, device)
    return {"q": q, "k": k, "v": v}, ("q",)


OPERATIONS: tuple[Operation, ...] = (
    *DENSE,
    *FUSED,
    _records("pack_records"),
    _records("unpack_records"),
    Operation(name="kv_store.store_records", build=_store, variants=_FORMATS),
    Operation(name="kv_store.gather_records", build=_gather, variants=_FORMATS),
    Operation(name="kv_compress.compress_pairs", build=_compress, sizes=(1, 2, 5, 16, 17, 40)),
    Operation(
        name="indexer_logits.indexer_logits",
        build=_index_logits,
        variants=("exact", "rounded", "FP32"),
        sizes=(1, 2, 15, 16, 17, 64, 130),
    ),
    _scored("topk_indices"),
    _scored("candidate_blocks"),
    _scored("mask_to_candidates"),
    Operation(
        name="sparse_attention.sparse_attention",
        build=_attention,
        variants=("short", "tile", "long"),
        sizes=(1, 2, 15, 16, 17, 63, 64, 260),
    ),
    operation(
        "dense_attention.dense_attention",
        _dense,
        lambda t, _: dense_attention.dense_attention(t["q"], t["k"], t["v"], 32**-0.5),
        variants=("1", "63", "64", "65", "130"),
        sizes=(1, 2, 15, 16, 17, 33, 130),
    ),
    Operation(name="swa_indices.window_slots", build=_window_slots),
    Operation(name="swa_indices.entry_slots", build=_entry_slots),
    Operation(name="lookback_ids.lookback_ids", build=_lookback),
)

# Public functions that have no rows of a batch, and why.
WITHOUT_ROWS: Mapping[str, str] = {
    "linear.dequantize_blocks": "works on weights",
    "rope.inverse_frequencies": "works on the configuration",
    "kv_store.require_cache": "checks arguments",
    "peer_exchange.gather_columns": "needs a rank beside this one; the relations of two ranks take it",
    "peer_exchange.merge_rows": "needs a rank beside this one; the relations of two ranks take it",
    "peer_exchange.memory_bytes": "works on the number of ranks",
}
