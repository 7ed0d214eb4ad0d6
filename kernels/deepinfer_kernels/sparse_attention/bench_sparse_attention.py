"""Bench of attention: decoding rows with lists of their own, and the rows of one prompt.

Run with ``python -m deepinfer_kernels.sparse_attention.bench_sparse_attention``.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, record_cache
from deepinfer_kernels.kv_store import RecordFormat
from deepinfer_kernels.sparse_attention import sparse_attention

PAGE = 64
FORMATS = (RecordFormat.MXFP8, RecordFormat.NVFP4)
DECODE_ROWS = (1024, 132)  # many, and one row for each processor of the card


def _decode_slots(device: str, num_rows: int, length: int) -> torch.Tensor:
    return torch.arange(num_rows, device=device)[:, None] * length + torch.randperm(length, device=device)


def _prefill_slots(device: str, num_rows: int, length: int, is_window: bool) -> torch.Tensor:
    row = torch.arange(num_rows, device=device)[:, None]
    if is_window:
        slots = row - (length - 1) + torch.arange(length, device=device)
        return slots.masked_fill(slots < 0, -1)
    return torch.rand(num_rows, num_rows, device=device).topk(length, dim=1).indices.sort(dim=1).values


def _case(num_rows: int, sizes: Sizes, is_prefill: bool) -> Case:
    heads, width, lengths = sizes.num_heads, sizes.head_dim, (sizes.sliding_window, sizes.index_topk)
    pairs = sizes.rotary_dim // 2

    def make(device: str) -> partial[torch.Tensor]:
        lists = []
        for length, fmt in zip(lengths, FORMATS, strict=True):
            num_records = num_rows if is_prefill else num_rows * length
            slots = _decode_slots(device, num_rows, length)
            if is_prefill:
                slots = _prefill_slots(device, num_rows, length, fmt is FORMATS[0])
            lists.append((record_cache(device, num_records, PAGE, width, fmt), slots))
        window, entries = lists
        angles = torch.rand(num_rows, pairs, device=device)
        return partial(
            sparse_attention,
            bf16(device, num_rows, heads, width),
            *window,
            *entries,
            torch.zeros(heads, device=device),
            width**-0.5,
            window_format=FORMATS[0],
            compressed_format=FORMATS[1],
            round_p=True,
            cos=angles.cos(),
            sin=angles.sin(),
        )

    records = sum(length * fmt.record_bytes(width) for length, fmt in zip(lengths, FORMATS, strict=True))
    shared = sum(fmt.record_bytes(width) for fmt in FORMATS)  # a prompt's rows list each other's records
    row_bytes = 4 * heads * width + 8 * sum(lengths) + 8 * pairs + (shared if is_prefill else records)
    return Case(
        op="sparse_attention",
        name=f"{'prefill' if is_prefill else 'decode'} {num_rows} rows",
        num_bytes=num_rows * row_bytes + 4 * heads,
        flops=num_rows * 4 * heads * width * sum(lengths),
        make=make,
        is_gather=True,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Decoding rows read every record they list; a prompt's records count once, and it is longer than a selection."""
    most = max(sizes.rows)
    decode = (*(rows for rows in sizes.rows if rows < most), *(rows for rows in DECODE_ROWS if rows < most))
    return [*(_case(rows, sizes, False) for rows in decode), _case(most, sizes, True)]


if __name__ == "__main__":
    run_bench("sparse_attention", cases)
