"""Bench of the sampler's noise: ``python -m deepinfer_kernels.sampling_noise.bench_sampling_noise``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers
from deepinfer_kernels.sampling_noise import gumbel_noise

PHILOX_OPERATIONS = 100  # ten rounds of two wide products, exclusive ors and key additions for four words


def _case(num_rows: int, sizes: Sizes) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        seeds, hashes, positions = integers(device, 0, 1 << 20, torch.int64, 3, num_rows).unbind()
        return partial(gumbel_noise, seeds, hashes, positions, sizes.vocab_size)

    return Case(
        op="sampling_noise",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (8 * sizes.vocab_size + 24),
        flops=num_rows * sizes.vocab_size * (PHILOX_OPERATIONS // 4 + 4),
        make=make,
        in_graph=False,
    )


def cases(sizes: Sizes) -> list[Case]:
    """One noise for every token id of a sampled row."""
    return [_case(rows, sizes) for rows in sizes.head_rows]


if __name__ == "__main__":
    run_bench("sampling_noise", cases)
