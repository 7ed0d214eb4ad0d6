"""Bench of index scores and selection: ``python -m deepinfer_kernels.indexer_topk.bench_indexer_topk``.

Decode: one row per request over its own keys. Prefill: the rows of one request. Bytes of the scores are keys read once
per request, queries and scores; bytes of a selection are one read of the scores and its list.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices
from deepinfer_kernels.kv_store import RecordFormat

HEADS, HEAD_DIM, PAGE = 32, 128, 64
# requests, rows of each, entries of each
SHAPES = ((1, 1, 65536), (64, 1, 4096), (64, 1, 65536), (1, 1, 1 << 20), (1, 4096, 4096))


def _logits(num_reqs: int, rows: int, entries: int, ceilings: Ceilings) -> tuple[Record, torch.Tensor]:
    pages = entries // PAGE
    num_bytes = num_reqs * entries * 68 + num_reqs * rows * (HEADS * HEAD_DIM * 2 + entries * 4)
    table = torch.randperm(num_reqs * pages, device="cuda").view(num_reqs, pages).int()
    req_idx = torch.arange(num_reqs, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    visible = torch.full((num_reqs * rows,), entries, device="cuda")
    if rows > 1:
        visible = torch.arange(1, rows + 1, device="cuda").repeat(num_reqs) * entries // rows
    calls = []
    for _ in range(rotation(num_bytes)):
        cache = torch.randint(0, 256, (num_reqs * pages, PAGE, 68), dtype=torch.uint8, device="cuda")
        cache.flatten(1)[:, PAGE * 64 :] = 127
        q = (torch.randint(-6, 7, (num_reqs * rows, HEADS, HEAD_DIM), device="cuda") / 4).bfloat16()
        weights = torch.randn(num_reqs * rows, HEADS, device="cuda", dtype=torch.bfloat16)
        arguments = (q, weights, cache, table, req_idx, visible, entries)
        options = {"fmt": RecordFormat.MXFP4, "entries_per_block": PAGE, "round_bf16": True}
        calls.append(partial(indexer_logits, *arguments, **options))  # type: ignore[arg-type]
    name = f"{num_reqs} x {rows} rows, {entries} entries"
    flops = 2 * HEADS * HEAD_DIM * int(visible.sum())
    record = measure("indexer_logits", name, calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings)
    scores = calls[0]()
    return record, scores


def cases(ceilings: Ceilings) -> list[Record]:
    """Scores and selections at few and many entries."""
    records = []
    for num_reqs, rows, entries in SHAPES:
        record, scores = _logits(num_reqs, rows, entries, ceilings)
        records.append(record)
        name = f"{num_reqs * rows} rows, {entries} entries"
        visible = (scores > -torch.inf).sum(dim=1)
        copies = [scores] + [scores.clone() for _ in range(rotation(scores.nbytes) - 1)]
        blocks = candidate_blocks(scores, visible, 2048, 8)
        cases_of_scores = {
            "topk 512": (partial(topk_indices, k=512), scores.nbytes + len(scores) * 2048),
            "candidates": (
                partial(candidate_blocks, num_visible=visible, num_blocks=2048, block_size=8),
                scores.nbytes + len(scores) * 8192,
            ),
            "mask": (partial(mask_to_candidates, blocks=blocks, block_size=8), 2 * scores.nbytes),
        }
        for op, (call, num_bytes) in cases_of_scores.items():
            calls = [partial(call, copy) for copy in copies]
            records.append(measure(op, name, calls, num_bytes=num_bytes, flops=0, ceilings=ceilings))
    return records


if __name__ == "__main__":
    run_bench("indexer_topk", cases)
