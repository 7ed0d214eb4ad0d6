"""Bench of the pooling of pairs: ``python -m deepinfer_kernels.kv_compress.bench_kv_compress``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, normal
from deepinfer_kernels.kv_compress import compress_pairs

RING = 8


def _case(num_rows: int, sizes: Sizes) -> Case:
    width = sizes.head_dim

    def make(device: str) -> partial[torch.Tensor]:
        latent, score = (normal(device, torch.float32, num_rows, width) for _ in range(2))
        positions, req_idx = torch.arange(num_rows, device=device), torch.zeros(num_rows, device=device).int()
        state, block = torch.zeros(1, RING, 2 * width, device=device), torch.zeros(1, device=device).int()
        return partial(compress_pairs, latent, score, positions, req_idx, state, block, out_dtype=torch.bfloat16)

    return Case(
        op="kv_compress",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (10 * width + 12) + 4 + 8 * width * min(num_rows, RING),
        flops=4 * num_rows * width,
        make=make,
        is_gather=num_rows < RING,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Consecutive rows of one request; the last ones are kept as well."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("kv_compress", cases)
