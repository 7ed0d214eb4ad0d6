"""Bench of the n-gram hash: ``python -m deepinfer_kernels.engram_hash.bench_engram_hash``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers
from deepinfer_kernels.engram_hash import engram_rows

MAX_NGRAM = 4


def _case(num_rows: int, sizes: Sizes) -> Case:
    columns = sizes.engram_columns

    def make(device: str) -> partial[torch.Tensor]:
        ids = integers(device, 0, 99092, torch.int64, num_rows, MAX_NGRAM)
        multipliers = integers(device, 1 << 40, 1 << 46, torch.int64, MAX_NGRAM)
        primes = integers(device, sizes.engram_rows // 2, sizes.engram_rows, torch.int64, columns)
        return partial(engram_rows, ids, multipliers, primes, torch.zeros_like(primes))

    return Case(
        op="engram_hash",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (8 * MAX_NGRAM + 4 * columns) + 8 * (MAX_NGRAM + 2 * columns),
        flops=num_rows * (2 * MAX_NGRAM + 2 * columns),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("engram_hash", cases)
