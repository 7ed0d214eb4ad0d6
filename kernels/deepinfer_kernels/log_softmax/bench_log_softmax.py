"""Bench of the log-probabilities: ``python -m deepinfer_kernels.log_softmax.bench_log_softmax``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers, normal
from deepinfer_kernels.log_softmax import log_softmax, log_sum_exp, token_log_softmax

NUM_IDS = 5


def _case(num_rows: int, sizes: Sizes, name: str) -> Case:
    vocab = sizes.vocab_size

    def make(device: str) -> partial[torch.Tensor]:
        logits = normal(device, torch.float32, num_rows, vocab)
        if name == "whole rows":
            return partial(log_softmax, logits)
        if name == "normaliser":
            return partial(log_sum_exp, logits)
        return partial(token_log_softmax, logits, integers(device, 0, vocab, torch.int64, num_rows, NUM_IDS))

    results = {"whole rows": 4 * vocab, "normaliser": 4, "chosen tokens": 12 * NUM_IDS}[name]
    return Case(
        op="log_softmax",
        name=f"{name} {num_rows} rows",
        num_bytes=num_rows * (4 * vocab + results),
        flops=4 * num_rows * vocab,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Sampled rows of the vocabulary; a perfect kernel reads the logits once."""
    names = ("whole rows", "chosen tokens", "normaliser")
    return [_case(rows, sizes, name) for name in names for rows in sizes.head_rows]


if __name__ == "__main__":
    run_bench("log_softmax", cases)
