"""Bench of the collapse of the residual streams: ``python -m deepinfer_kernels.hc_collapse.bench_hc_collapse``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.hc_collapse import hc_collapse


def _case(num_rows: int, sizes: Sizes) -> Case:
    streams, width = sizes.num_streams, sizes.hidden_size
    return Case(
        op="hc_collapse",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (2 * width * (streams + 1) + 4 * streams),
        flops=2 * num_rows * streams * width,
        make=lambda device: partial(
            hc_collapse, bf16(device, num_rows, streams, width), torch.rand(num_rows, streams, device=device)
        ),
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("hc_collapse", cases)
