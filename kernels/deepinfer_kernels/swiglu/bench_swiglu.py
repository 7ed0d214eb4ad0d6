"""Bench of the clamped SwiGLU (shared expert): ``python -m deepinfer_kernels.swiglu.bench_swiglu``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.swiglu import swiglu

WIDTH, LIMIT = 2304, 10.0
SIZES = (64, 4096, 32768)


def cases(ceilings: Ceilings) -> list[Record]:
    """Few and many rows."""
    records = []
    for num_rows in SIZES:
        num_bytes = 2 * num_rows * WIDTH * 3
        calls = []
        for _ in range(rotation(num_bytes)):
            gate, up = torch.randn(2, num_rows, WIDTH, device="cuda", dtype=torch.bfloat16).unbind()
            calls.append(partial(swiglu, gate, up, LIMIT))
        flops = 5 * num_rows * WIDTH
        records.append(measure("swiglu", f"M={num_rows}", calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings))
    return records


if __name__ == "__main__":
    run_bench("swiglu", cases)
