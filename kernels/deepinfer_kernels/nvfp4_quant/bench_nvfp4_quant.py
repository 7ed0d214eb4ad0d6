"""Bench of the NVFP4 quantiser: ``python -m deepinfer_kernels.nvfp4_quant.bench_nvfp4_quant``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.nvfp4_quant import nvfp4_fake_quant, nvfp4_quant

SHAPES = ((64, 5120), (4096, 5120), (65536, 512))


def cases(ceilings: Ceilings) -> list[Record]:
    """Rows of hidden states, few and many, and rows of one record; to codes, and to codes and back."""
    records = []
    for num_rows, width in SHAPES:
        inputs = [
            torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
            for _ in range(rotation(4 * num_rows * width))
        ]
        for name, call, row_bytes in (
            ("to codes", nvfp4_quant, 2 * width + width // 2 + width // 16),
            ("and back", nvfp4_fake_quant, 4 * width),
        ):
            records.append(
                measure(
                    "nvfp4_quant",
                    f"{num_rows} x {width} {name}",
                    [partial(call, x) for x in inputs],
                    num_bytes=num_rows * row_bytes,
                    flops=num_rows * width,
                    ceilings=ceilings,
                )
            )
    return records


if __name__ == "__main__":
    run_bench("nvfp4_quant", cases)
