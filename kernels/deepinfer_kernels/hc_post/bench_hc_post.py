"""Bench of the update of the residual streams: ``python -m deepinfer_kernels.hc_post.bench_hc_post``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.hc_post import hc_post


def _case(num_rows: int, sizes: Sizes) -> Case:
    streams, width = sizes.num_streams, sizes.hidden_size

    def make(device: str) -> partial[torch.Tensor]:
        post = torch.rand(num_rows, streams, device=device)
        comb = torch.rand(num_rows, streams, streams, device=device)
        return partial(hc_post, bf16(device, num_rows, width), bf16(device, num_rows, streams, width), post, comb)

    return Case(
        op="hc_post",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (2 * width * (2 * streams + 1) + 4 * streams * (streams + 1)),
        flops=2 * num_rows * streams * (streams + 1) * width,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("hc_post", cases)
