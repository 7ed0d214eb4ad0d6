"""Bench of the clamped SwiGLU of the shared expert: ``python -m deepinfer_kernels.swiglu.bench_swiglu``."""

from functools import partial

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.swiglu import swiglu

LIMIT = 10.0


def _case(num_rows: int, width: int) -> Case:
    return Case(
        op="swiglu",
        name=f"{num_rows} x {width}",
        num_bytes=6 * num_rows * width,
        flops=5 * num_rows * width,
        make=lambda device: partial(swiglu, bf16(device, num_rows, width), bf16(device, num_rows, width), LIMIT),
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes.intermediate_size) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("swiglu", cases)
