"""Bench of the selections: ``python -m deepinfer_kernels.indexer_topk.bench_indexer_topk``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, normal
from deepinfer_kernels.indexer_topk import candidate_blocks, mask_to_candidates, topk_indices

BLOCK = 8


def _scores(device: str, num_rows: int, entries: int) -> torch.Tensor:
    return normal(device, torch.bfloat16, num_rows, entries).float()  # index scores hold bf16 values: ties are common


def _topk(num_rows: int, entries: int, k: int) -> Case:
    return Case(
        op="indexer_topk",
        name=f"topk {k}: {num_rows} rows, {entries} entries",
        num_bytes=4 * num_rows * (entries + k),
        flops=num_rows * entries,
        make=lambda device: partial(topk_indices, _scores(device, num_rows, entries), k),
    )


def _narrow(num_rows: int, entries: int, width: int, k: int) -> Case:
    """Short contexts in a buffer of the longest allowed, as in a captured graph."""

    def make(device: str) -> partial[torch.Tensor]:
        visible = torch.full((num_rows,), entries, device=device)
        return partial(topk_indices, _scores(device, num_rows, width), k, visible)

    return Case(
        op="indexer_topk",
        name=f"topk {k}: {num_rows} rows, {entries} of {width} entries",
        num_bytes=4 * num_rows * (entries + k),
        flops=num_rows * entries,
        make=make,
        is_gather=True,
    )


def _candidates(num_rows: int, entries: int, num_blocks: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        visible = torch.full((num_rows,), entries, device=device)
        return partial(candidate_blocks, _scores(device, num_rows, entries), visible, num_blocks, BLOCK)

    return Case(
        op="indexer_topk",
        name=f"candidates: {num_rows} rows, {entries} entries",
        num_bytes=num_rows * (4 * entries + 8 + 4 * num_blocks),
        flops=num_rows * entries,
        make=make,
    )


def _mask(num_rows: int, entries: int, num_blocks: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        first = torch.arange(num_blocks, dtype=torch.int32, device=device)
        blocks = first.masked_fill(first >= entries // BLOCK, -1).repeat(num_rows, 1)
        return partial(mask_to_candidates, _scores(device, num_rows, entries), blocks, BLOCK)

    return Case(
        op="indexer_topk",
        name=f"mask: {num_rows} rows, {entries} entries",
        num_bytes=4 * num_rows * (2 * entries + num_blocks),
        flops=num_rows * entries,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """The selection of entries, of candidate blocks, and the mask of the latter."""
    found = []
    for num_reqs, rows, entries in sizes.entries:
        num_rows = num_reqs * rows
        found.append(_topk(num_rows, entries, sizes.index_topk))
        found.append(_candidates(num_rows, entries, sizes.candidate_blocks))
        found.append(_mask(num_rows, entries, sizes.candidate_blocks))
    found += [_narrow(*shape, sizes.index_topk) for shape in sizes.narrow_entries]
    return found


if __name__ == "__main__":
    run_bench("indexer_topk", cases)
