"""Bench of the rotation of queries and of key-value rows: ``python -m deepinfer_kernels.rope.bench_rope``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.rope import rope


def _case(num_rows: int, num_heads: int, sizes: Sizes) -> Case:
    pairs = sizes.rotary_dim // 2

    def make(device: str) -> partial[torch.Tensor]:
        angles = torch.rand(num_rows, pairs, device=device)
        return partial(rope, bf16(device, num_rows, num_heads, sizes.head_dim), angles.cos(), angles.sin())

    return Case(
        op="rope",
        name=f"{num_rows} x {num_heads} vectors",
        num_bytes=num_rows * (4 * num_heads * sizes.head_dim + 8 * pairs),
        flops=6 * num_rows * num_heads * pairs,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Queries of all heads, and the one vector a token keeps."""
    return [_case(rows, heads, sizes) for heads in (sizes.num_heads, 1) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("rope", cases)
