"""Bench of attention, run with ``python -m deepinfer_kernels.sparse_attention.bench_sparse_attention``.

Decode: every row lists 128 window and 512 compressed records of its own. Prefill: rows of a chunk share their records.
Bytes are queries, result and, for decode, every listed record; operations are both products over all 640 slots.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.kv_store import RecordFormat, store_records
from deepinfer_kernels.sparse_attention.hopper_kernel import fits_hopper, sparse_attention_hopper
from deepinfer_kernels.sparse_attention.reference import SlotList
from deepinfer_kernels.sparse_attention.triton_kernel import sparse_attention_triton

HEADS, HEAD_DIM, WINDOW, SELECTED = 64, 512, 128, 512
PAGE = 64
DECODE_ROWS = (1, 16, 64, 132, 256, 1024)
PREFILL_ROWS = (4096,)
FORMATS = (RecordFormat.MXFP8, RecordFormat.NVFP4)


def _cache(num_records: int, fmt: RecordFormat) -> torch.Tensor:
    pages = -(-num_records // PAGE)
    cache = torch.empty((pages, PAGE, fmt.record_bytes(HEAD_DIM)), dtype=torch.uint8, device="cuda")
    slots = torch.arange(pages * PAGE, device="cuda")
    for chunk in torch.split(slots, 1 << 17):
        store_records(cache, chunk, torch.randn(len(chunk), HEAD_DIM, device="cuda"), fmt)
    return cache


def _slots(num_rows: int, length: int, is_prefill: bool) -> torch.Tensor:
    row = torch.arange(num_rows, device="cuda")[:, None]
    if not is_prefill:
        return row * length + torch.randperm(length, device="cuda")
    if length == WINDOW:
        slots = row - (WINDOW - 1) + torch.arange(WINDOW, device="cuda")
        return slots.masked_fill(slots < 0, -1)
    chosen = torch.rand(num_rows, num_rows, device="cuda").topk(length, dim=1).indices
    return chosen.sort(dim=1).values


def cases(ceilings: Ceilings) -> list[Record]:
    """Decode and prefill sizes with the table of tiles."""
    records = []
    for num_rows, is_prefill in [(n, False) for n in DECODE_ROWS] + [(n, True) for n in PREFILL_ROWS]:
        lists = []
        for length, fmt in zip((WINDOW, SELECTED), FORMATS, strict=True):
            cache = _cache(num_rows if is_prefill else num_rows * length, fmt)
            lists.append(SlotList(kv_cache=cache, slots=_slots(num_rows, length, is_prefill), fmt=fmt))
        sink = torch.zeros(HEADS, device="cuda")
        angles = torch.rand(num_rows, 32, device="cuda")
        per_row = 4 * HEADS * HEAD_DIM
        if not is_prefill:
            per_row += WINDOW * FORMATS[0].record_bytes(HEAD_DIM) + SELECTED * FORMATS[1].record_bytes(HEAD_DIM)
        copies = 1 if is_prefill else rotation(num_rows * per_row)
        caches = [
            [SlotList(kv_cache=p.kv_cache.clone(), slots=p.slots, fmt=p.fmt) for p in lists] for _ in range(copies)
        ]
        q = torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        attend = sparse_attention_hopper if fits_hopper(q, lists) else sparse_attention_triton
        calls = [
            partial(attend, q, parts, sink, HEAD_DIM**-0.5, cos=angles.cos(), sin=angles.sin()) for parts in caches
        ]
        flops = num_rows * 4 * HEADS * HEAD_DIM * (WINDOW + SELECTED)
        name = f"{'prefill' if is_prefill else 'decode'} {num_rows} rows"
        case = measure("sparse_attention", name, calls, num_bytes=num_rows * per_row, flops=flops, ceilings=ceilings)
        records.append(case)
    return records


if __name__ == "__main__":
    run_bench("sparse_attention", cases)
