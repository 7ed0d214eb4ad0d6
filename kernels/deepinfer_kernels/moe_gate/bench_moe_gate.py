"""Bench of the router, the product with its weight included.

Run with ``python -m deepinfer_kernels.moe_gate.bench_moe_gate``.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.moe_gate import moe_gate

SCALING = 1.5


def _case(num_rows: int, sizes: Sizes) -> Case:
    width, experts = sizes.hidden_size, sizes.num_experts

    def make(device: str) -> partial[tuple[torch.Tensor, torch.Tensor]]:
        bias = torch.randn(experts, device=device) / 10
        weight = bf16(device, experts, width) / width**0.5
        return partial(moe_gate, bf16(device, num_rows, width), weight, bias, top_k=sizes.top_k, scaling=SCALING)

    return Case(
        op="moe_gate",
        name=f"{num_rows} rows",
        num_bytes=2 * width * (experts + num_rows) + 4 * experts + 8 * num_rows * sizes.top_k,
        flops=2 * num_rows * width * experts,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many tokens."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("moe_gate", cases)
