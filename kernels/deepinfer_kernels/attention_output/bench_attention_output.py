"""Bench of the end of attention: ``python -m deepinfer_kernels.attention_output.bench_attention_output``."""

from functools import partial

import torch

from deepinfer_kernels.attention_output import attention_output
from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, mxfp8_weight


def _case(num_rows: int, sizes: Sizes) -> Case:
    hidden, streams, groups = sizes.hidden_size, sizes.num_streams, sizes.o_groups
    depth, low = sizes.num_heads * sizes.head_dim // groups, groups * sizes.o_lora_rank
    num_weights = low * depth + hidden * low

    def make(device: str) -> partial[torch.Tensor]:
        return partial(
            attention_output,
            bf16(device, num_rows, groups, depth),
            mxfp8_weight(device, low, depth),
            mxfp8_weight(device, hidden, low),
            bf16(device, num_rows, streams, hidden),
            torch.rand(num_rows, streams, device=device),
            torch.rand(num_rows, streams, streams, device=device),
            quantize=True,
        )

    mix_bytes = 2 * hidden * 2 * streams + 4 * streams * (streams + 1)
    return Case(
        op="attention_output",
        name=f"{num_rows} rows",
        num_bytes=num_weights + num_weights // 1024 + num_rows * (2 * groups * depth + mix_bytes),
        flops=2 * num_rows * (num_weights + streams * (streams + 1) * hidden),
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("attention_output", cases)
