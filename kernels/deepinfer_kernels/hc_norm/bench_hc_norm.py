"""Bench of a sublayer's input, with rows for the experts: ``python -m deepinfer_kernels.hc_norm.bench_hc_norm``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.hc_norm import SublayerInput, hc_norm


def _case(num_rows: int, sizes: Sizes) -> Case:
    streams, width = sizes.num_streams, sizes.hidden_size

    def make(device: str) -> partial[SublayerInput]:
        pre = torch.rand(num_rows, streams, device=device)
        given = bf16(device, num_rows, streams, width), pre, bf16(device, width)
        return partial(hc_norm, *given, 1e-20, quantize=True, for_experts=True)

    return Case(
        op="hc_norm",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (2 * width * (streams + 3) + 4 * streams) + 2 * width,
        flops=num_rows * width * (2 * streams + 4),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("hc_norm", cases)
