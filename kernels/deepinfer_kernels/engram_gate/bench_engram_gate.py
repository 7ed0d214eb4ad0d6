"""Bench of the Engram gate: ``python -m deepinfer_kernels.engram_gate.bench_engram_gate``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.engram_gate import engram_gate


def _case(num_rows: int, sizes: Sizes) -> Case:
    streams, width = sizes.num_streams, sizes.hidden_size

    def make(device: str) -> partial[torch.Tensor]:
        rows, key = (bf16(device, num_rows, streams, width) for _ in range(2))
        q_weight, k_weight = (bf16(device, streams, width) for _ in range(2))
        return partial(engram_gate, rows, key, bf16(device, num_rows, width), q_weight, k_weight, 1e-20)

    return Case(
        op="engram_gate",
        name=f"{num_rows} rows",
        num_bytes=2 * width * (num_rows * (3 * streams + 1) + 2 * streams),
        flops=10 * num_rows * streams * width,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("engram_gate", cases)
