"""Bench of the mix coefficients: ``python -m deepinfer_kernels.hc_sinkhorn.bench_hc_sinkhorn``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, normal
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn

ITERS = 20


def _case(num_rows: int, sizes: Sizes) -> Case:
    logits = (2 + sizes.num_streams) * sizes.num_streams

    def make(device: str) -> partial[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        inputs = (normal(device, torch.float32, *shape) for shape in ((num_rows, logits), (3,), (logits,)))
        return partial(hc_sinkhorn, *inputs, iters=ITERS, eps=1e-6)

    return Case(
        op="hc_sinkhorn",
        name=f"{num_rows} rows",
        num_bytes=4 * (2 * num_rows * logits + 3 + logits),
        flops=num_rows * (4 * ITERS * sizes.num_streams**2 + 6 * logits),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("hc_sinkhorn", cases)
