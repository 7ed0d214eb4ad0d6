"""Bench of attention inside an image: ``python -m deepinfer_kernels.dense_attention.bench_dense_attention``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.dense_attention import dense_attention

_HEADS, _HEAD_DIM = 16, 64


def _case(num_rows: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        q, k, v = (bf16(device, num_rows, _HEADS, _HEAD_DIM) for _ in range(3))
        return partial(dense_attention, q, k, v, _HEAD_DIM**-0.5)

    return Case(
        op="dense_attention",
        name=f"image of {num_rows} rows",
        num_bytes=4 * 2 * num_rows * _HEADS * _HEAD_DIM,
        flops=4 * num_rows * num_rows * _HEADS * _HEAD_DIM,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """The released tower at its smallest image (39 x 39 patches) and at its largest; small ones in a test."""
    rows = (1521, 9180) if sizes.hidden_size > 1024 else (36, 90)
    return [_case(num_rows) for num_rows in rows]


if __name__ == "__main__":
    run_bench("dense_attention", cases)
