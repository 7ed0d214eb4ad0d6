"""Bench of packing vectors into cache pages, and of reading them back.

Run with ``python -m deepinfer_kernels.kv_store.bench_kv_store``.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.kv_store import RecordFormat, gather_records, store_records

PAGE = 64


def _inputs(device: str, num_rows: int, width: int, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    pages = torch.zeros(-(-num_rows // PAGE), PAGE, fmt.record_bytes(width), dtype=torch.uint8, device=device)
    return pages, torch.randperm(num_rows, device=device)


def _store(num_rows: int, width: int, fmt: RecordFormat) -> Case:
    def make(device: str) -> partial[None]:
        return partial(store_records, *_inputs(device, num_rows, width, fmt), bf16(device, num_rows, width), fmt)

    num_bytes = num_rows * (2 * width + fmt.record_bytes(width) + 8)
    name = f"store {fmt.value} {num_rows} x {width}"
    return Case(op="kv_store", name=name, num_bytes=num_bytes, flops=4 * num_rows * width, make=make, is_gather=True)


def _gather(num_rows: int, width: int, fmt: RecordFormat) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        return partial(gather_records, *_inputs(device, num_rows, width, fmt), width, fmt, torch.bfloat16)

    num_bytes = num_rows * (2 * width + fmt.record_bytes(width) + 8)
    name = f"gather {fmt.value} {num_rows} x {width}"
    return Case(op="kv_store", name=name, num_bytes=num_bytes, flops=num_rows * width, make=make, is_gather=True)


def cases(sizes: Sizes) -> list[Case]:
    """The three formats that the caches hold."""
    formats = (
        (RecordFormat.MXFP8, sizes.head_dim),
        (RecordFormat.NVFP4, sizes.head_dim),
        (RecordFormat.MXFP4, sizes.index_dim),
    )
    stores = [_store(rows, width, fmt) for fmt, width in formats for rows in sizes.rows]
    return stores + [_gather(max(sizes.rows), width, fmt) for fmt, width in formats]


if __name__ == "__main__":
    run_bench("kv_store", cases)
