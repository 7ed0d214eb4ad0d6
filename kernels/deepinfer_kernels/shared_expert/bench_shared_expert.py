"""Bench of the shared expert: ``python -m deepinfer_kernels.shared_expert.bench_shared_expert``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, mxfp8_weight
from deepinfer_kernels.shared_expert import shared_expert
from deepinfer_kernels.tiling import MX_BLOCK


def _case(num_rows: int, sizes: Sizes) -> Case:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    num_weights = 3 * hidden * inner

    def make(device: str) -> partial[torch.Tensor]:
        weight, scale = mxfp8_weight(device, 2 * inner, hidden)
        blocks = inner // MX_BLOCK
        gate, up = (weight[:inner], scale[:blocks]), (weight[inner:], scale[blocks:])
        rows = bf16(device, num_rows, hidden)  # any bf16 rows are prepared rows of something
        down = mxfp8_weight(device, hidden, inner)
        return partial(shared_expert, rows, gate, up, down, limit=10.0, out_dtype=torch.bfloat16, quantize=True)

    return Case(
        op="shared_expert",
        name=f"{num_rows} rows",
        num_bytes=num_weights + num_weights // 1024 + 4 * num_rows * hidden,
        flops=2 * num_rows * num_weights,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("shared_expert", cases)
