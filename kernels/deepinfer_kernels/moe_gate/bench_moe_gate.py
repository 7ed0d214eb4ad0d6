"""Bench of the router at the width of DeepSeek-V4.1-Flash: ``python -m deepinfer_kernels.moe_gate.bench_moe_gate``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.moe_gate import moe_gate

HIDDEN_SIZE, NUM_EXPERTS, TOP_K, SCALING = 5120, 384, 6, 1.5
SIZES = (1, 64, 4096)


def cases(ceilings: Ceilings) -> list[Record]:
    """Few and many tokens; the product with the router's weight included."""
    records = []
    for num_tokens in SIZES:
        num_bytes = 2 * HIDDEN_SIZE * (NUM_EXPERTS + num_tokens) + 8 * num_tokens * TOP_K
        calls = []
        for _ in range(rotation(num_bytes)):
            x = torch.randn(num_tokens, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16) / HIDDEN_SIZE**0.5
            bias = torch.randn(NUM_EXPERTS, device="cuda") / 10
            calls.append(partial(moe_gate, x, weight, bias, top_k=TOP_K, scaling=SCALING))
        flops = 2 * num_tokens * HIDDEN_SIZE * NUM_EXPERTS
        records.append(
            measure("moe_gate", f"T={num_tokens}", calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings)
        )
    return records


if __name__ == "__main__":
    run_bench("moe_gate", cases)
