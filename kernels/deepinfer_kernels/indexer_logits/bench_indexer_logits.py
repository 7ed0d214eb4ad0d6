"""Bench of the index scores: ``python -m deepinfer_kernels.indexer_logits.bench_indexer_logits``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, integers
from deepinfer_kernels.indexer_logits import indexer_logits
from deepinfer_kernels.kv_store import RecordFormat

PAGE = 64


def _case(num_reqs: int, rows: int, entries: int, sizes: Sizes, width: int | None = None) -> Case:
    heads, head_dim, fmt = sizes.index_heads, sizes.index_dim, RecordFormat.MXFP4
    pages = -(-entries // PAGE)
    # A prompt's rows see more and more entries, decoding rows all of them.
    visible = [entries * (row + 1) // rows for row in range(rows)] * num_reqs

    def make(device: str) -> partial[torch.Tensor]:
        cache = integers(device, 0, 256, torch.uint8, num_reqs * pages, PAGE, fmt.record_bytes(head_dim))
        cache.flatten(1)[:, PAGE * fmt.value_bytes(head_dim) :] = 127
        return partial(
            indexer_logits,
            integers(device, -6, 7, torch.int32, num_reqs * rows, heads, head_dim).bfloat16() / 4,
            bf16(device, num_reqs * rows, heads),
            cache,
            torch.randperm(num_reqs * pages, device=device).view(num_reqs, pages).int(),
            torch.arange(num_reqs, dtype=torch.int32, device=device).repeat_interleave(rows),
            torch.tensor(visible, device=device),
            width or entries,
            fmt=fmt,
            entries_per_block=PAGE,
            round_bf16=True,
        )

    row_bytes = 2 * heads * (head_dim + 1) + 12 + 4 * entries
    return Case(
        op="indexer_logits",
        name=f"{num_reqs} x {rows} rows, {entries} entries" + ("" if width is None else f" of {width}"),
        num_bytes=num_reqs * (pages * (PAGE * fmt.record_bytes(head_dim) + 4) + rows * row_bytes),
        flops=2 * heads * head_dim * sum(visible),
        make=make,
        is_gather=width is not None,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Keys count once per request, however many rows read them; the filling of a wide buffer does not count."""
    narrow = [_case(reqs, 1, entries, sizes, width) for reqs, entries, width in sizes.narrow_entries]
    return [_case(*shape, sizes) for shape in sizes.entries] + narrow


if __name__ == "__main__":
    run_bench("indexer_logits", cases)
