"""Bench of the sums: ``python -m deepinfer_kernels.sum_smaller_probs.bench_sum_smaller_probs``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, normal
from deepinfer_kernels.sum_smaller_probs import sum_smaller_probs


def _case(num_rows: int, sizes: Sizes) -> Case:
    vocab = sizes.vocab_size

    def make(device: str) -> partial[torch.Tensor]:
        token_ids = torch.arange(num_rows, device=device) % vocab
        return partial(sum_smaller_probs, normal(device, torch.float32, num_rows, vocab), token_ids)

    return Case(
        op="sum_smaller_probs",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (4 * vocab + 12),
        flops=4 * num_rows * vocab,
        make=make,
        in_graph=False,
    )


def cases(sizes: Sizes) -> list[Case]:
    """One token of every row."""
    return [_case(rows, sizes) for rows in sizes.head_rows]


if __name__ == "__main__":
    run_bench("sum_smaller_probs", cases)
