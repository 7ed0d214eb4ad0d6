"""Bench of the gather of Engram rows: ``python -m deepinfer_kernels.engram_lookup.bench_engram_lookup``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers
from deepinfer_kernels.engram_lookup import engram_lookup


def _case(num_rows: int, sizes: Sizes) -> Case:
    columns, width = sizes.engram_columns, sizes.engram_width

    def make(device: str) -> partial[torch.Tensor]:
        codes = integers(device, 0, 120, torch.uint8, sizes.engram_rows, width)
        scale = torch.full((sizes.engram_rows, width // 32), 127, dtype=torch.uint8, device=device)
        rows = integers(device, 0, sizes.engram_rows, torch.int32, num_rows, columns)
        return partial(engram_lookup, codes.view(torch.float8_e4m3fn), scale, rows, torch.bfloat16)

    return Case(
        op="engram_lookup",
        name=f"{num_rows} rows",
        num_bytes=num_rows * columns * (4 + width + width // 32 + 2 * width),
        flops=num_rows * columns * width,
        make=make,
        is_gather=True,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows; every one reads table rows of its own."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("engram_lookup", cases)
