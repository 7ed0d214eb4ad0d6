"""Bench of top-k, top-p and min-p: ``python -m deepinfer_kernels.restrict_logits.bench_restrict_logits``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, normal
from deepinfer_kernels.restrict_logits import restrict_logits


def _case(num_rows: int, sizes: Sizes) -> Case:
    vocab = sizes.vocab_size

    def make(device: str) -> partial[torch.Tensor]:
        logits = normal(device, torch.float32, num_rows, vocab)
        top_k = torch.full((num_rows,), vocab // 2, dtype=torch.int32, device=device)
        top_p, min_p = (torch.full((num_rows,), value, device=device) for value in (0.9, 0.01))
        return partial(restrict_logits, logits, top_k, top_p, min_p)

    return Case(
        op="restrict_logits",
        name=f"{num_rows} rows",
        num_bytes=num_rows * (8 * vocab + 12),
        flops=4 * num_rows * vocab,
        make=make,
        in_graph=False,
    )


def cases(sizes: Sizes) -> list[Case]:
    """All three restrictions on every row."""
    return [_case(rows, sizes) for rows in sizes.head_rows]


if __name__ == "__main__":
    run_bench("restrict_logits", cases)
