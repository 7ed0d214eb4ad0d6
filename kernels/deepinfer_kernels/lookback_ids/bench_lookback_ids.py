"""Bench of the ids before each row: ``python -m deepinfer_kernels.lookback_ids.bench_lookback_ids``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes
from deepinfer_kernels.lookback_ids import lookback_ids
from deepinfer_kernels.lookback_ids.reference import make_inputs

DEPTH = 3
CONTEXT = 64


def _case(num_reqs: int, num_rows: int) -> Case:
    """Rows of equal requests that have run for a while."""
    lengths = [num_rows // num_reqs + (index < num_rows % num_reqs) for index in range(num_reqs)]
    max_model_len = CONTEXT + max(lengths)

    def make(device: str) -> partial[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        arguments = make_inputs(lengths, [CONTEXT] * num_reqs, 0, max_model_len, generator)
        out = torch.empty((num_rows, DEPTH), dtype=torch.int64, device=device)
        return partial(lookback_ids, **{name: value.to(device) for name, value in arguments.items()}, out=out)

    return Case(
        op="lookback_ids",
        name=f"{num_reqs} requests {num_rows} rows",
        num_bytes=num_rows * (12 + 8 * DEPTH) + num_reqs * 24,
        flops=4 * num_rows * DEPTH,
        make=make,
        is_gather=True,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Decode steps, and the same rows as one prompt."""
    return [_case(num_reqs, rows) for rows in sizes.rows for num_reqs in sorted({1, min(rows, 256)})]


if __name__ == "__main__":
    run_bench("lookback_ids", cases)
