"""Bench of the combine: ``python -m deepinfer_kernels.moe_combine.bench_moe_combine``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.moe_combine import moe_combine

HIDDEN_SIZE, TOP_K = 5120, 6
SIZES = (64, 4096)


def cases(ceilings: Ceilings) -> list[Record]:
    """Few and many tokens."""
    records = []
    for num_tokens in SIZES:
        num_bytes = 2 * num_tokens * HIDDEN_SIZE * (TOP_K + 2)
        calls = []
        for _ in range(rotation(num_bytes)):
            parts = torch.randn(num_tokens, TOP_K + 1, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16)
            calls.append(partial(moe_combine, parts[:, :TOP_K].contiguous(), parts[:, TOP_K].contiguous()))
        flops = num_tokens * HIDDEN_SIZE * TOP_K
        records.append(
            measure("moe_combine", f"T={num_tokens}", calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings)
        )
    return records


if __name__ == "__main__":
    run_bench("moe_combine", cases)
