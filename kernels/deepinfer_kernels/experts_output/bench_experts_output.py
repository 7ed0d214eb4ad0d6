"""Bench of the end of the mixture of experts: ``python -m deepinfer_kernels.experts_output.bench_experts_output``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.experts_output import experts_output


def _case(num_rows: int, sizes: Sizes) -> Case:
    hidden, streams, top_k = sizes.hidden_size, sizes.num_streams, sizes.top_k

    def make(device: str) -> partial[torch.Tensor]:
        return partial(
            experts_output,
            bf16(device, num_rows, top_k, hidden),
            bf16(device, num_rows, hidden),
            bf16(device, num_rows, streams, hidden),
            torch.rand(num_rows, streams, device=device),
            torch.rand(num_rows, streams, streams, device=device),
        )

    return Case(
        op="experts_output",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (2 * hidden * (top_k + 1 + 2 * streams) + 4 * streams * (streams + 1)),
        flops=num_rows * hidden * (top_k + 2 * streams * (streams + 1)),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("experts_output", cases)
