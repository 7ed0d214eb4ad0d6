"""Bench of the mix logits: ``python -m deepinfer_kernels.hc_mix.bench_hc_mix``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, normal
from deepinfer_kernels.hc_mix import hc_mix


def _case(num_rows: int, sizes: Sizes) -> Case:
    depth, logits = sizes.num_streams * sizes.hidden_size, (2 + sizes.num_streams) * sizes.num_streams

    def make(device: str) -> partial[torch.Tensor]:
        streams = bf16(device, num_rows, sizes.num_streams, sizes.hidden_size)
        return partial(hc_mix, streams, normal(device, torch.float32, logits, depth), 1e-20)

    return Case(
        op="hc_mix",
        name=f"{num_rows} rows",
        num_bytes=2 * num_rows * depth + 4 * logits * (depth + num_rows),
        flops=2 * num_rows * depth * (logits + 1),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("hc_mix", cases)
