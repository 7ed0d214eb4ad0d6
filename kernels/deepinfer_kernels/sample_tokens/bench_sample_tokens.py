"""Bench of the draw, its noise included: ``python -m deepinfer_kernels.sample_tokens.bench_sample_tokens``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers, normal
from deepinfer_kernels.sample_tokens import sample_tokens, top_tokens

NUM_TOP = 20


def _draw(num_rows: int, vocab_size: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        logits = normal(device, torch.float32, num_rows, vocab_size)
        numbers = (integers(device, 0, 1 << 20, torch.int64, num_rows) for _ in range(3))
        return partial(sample_tokens, logits, torch.ones(num_rows, device=device), *numbers)

    return Case(
        op="sample_tokens",
        name=f"draw {num_rows} rows",
        num_bytes=num_rows * (4 * vocab_size + 36),
        flops=3 * num_rows * vocab_size,
        make=make,
        in_graph=False,
    )


def _top(num_rows: int, vocab_size: int) -> Case:
    return Case(
        op="sample_tokens",
        name=f"top {NUM_TOP} of {num_rows} rows",
        num_bytes=num_rows * (4 * vocab_size + 8 * NUM_TOP),
        flops=num_rows * vocab_size,
        make=lambda device: partial(top_tokens, normal(device, torch.float32, num_rows, vocab_size), NUM_TOP),
        in_graph=False,
    )


def cases(sizes: Sizes) -> list[Case]:
    """A draw reads the logits once and writes a token."""
    draws = [_draw(rows, sizes.vocab_size) for rows in sizes.head_rows]
    return draws + [_top(rows, sizes.vocab_size) for rows in sizes.head_rows]


if __name__ == "__main__":
    run_bench("sample_tokens", cases)
