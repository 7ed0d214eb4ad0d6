"""Bench of the sum of the expert outputs: ``python -m deepinfer_kernels.moe_combine.bench_moe_combine``."""

from functools import partial

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.moe_combine import moe_combine


def _case(num_rows: int, sizes: Sizes) -> Case:
    width, top_k = sizes.hidden_size, sizes.top_k
    return Case(
        op="moe_combine",
        name=f"{num_rows} rows",
        num_bytes=2 * num_rows * width * (top_k + 2),
        flops=num_rows * width * top_k,
        make=lambda device: partial(moe_combine, bf16(device, num_rows, top_k, width), bf16(device, num_rows, width)),
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many tokens."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("moe_combine", cases)
