"""Bench of the linear layers; the time includes quantising the rows.

Run with ``python -m deepinfer_kernels.linear.bench_linear``.
"""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, mxfp8_weight
from deepinfer_kernels.linear import grouped_linear, linear, mxfp8_linear


def _mxfp8(name: str, num_rows: int, num_out: int, depth: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        x, (weight, scale) = bf16(device, num_rows, depth), mxfp8_weight(device, num_out, depth)
        return partial(mxfp8_linear, x, weight, scale, out_dtype=torch.bfloat16, quantize_input=True)

    return Case(
        op="mxfp8_linear",
        name=f"{name} [{num_out} x {depth}] {num_rows} rows",
        num_bytes=num_out * depth + num_out * depth // 1024 + 2 * num_rows * (depth + num_out),
        flops=2 * num_rows * num_out * depth,
        make=make,
    )


def _grouped(num_rows: int, groups: int, num_out: int, depth: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        x, (weight, scale) = bf16(device, num_rows, groups, depth), mxfp8_weight(device, groups * num_out, depth)
        return partial(grouped_linear, x, weight, scale, out_dtype=torch.bfloat16)

    weights = groups * num_out * depth
    return Case(
        op="grouped_linear",
        name=f"wo_a {groups} x [{num_out} x {depth}] {num_rows} rows",
        num_bytes=weights + weights // 1024 + 2 * num_rows * groups * (depth + num_out),
        flops=2 * num_rows * weights,
        make=make,
    )


def _plain(name: str, num_rows: int, num_out: int, depth: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        return partial(linear, bf16(device, num_rows, depth), bf16(device, num_out, depth), out_dtype=torch.float32)

    return Case(
        op="linear",
        name=f"{name} [{num_out} x {depth}] {num_rows} rows",
        num_bytes=2 * num_out * depth + num_rows * (2 * depth + 4 * num_out),
        flops=2 * num_rows * num_out * depth,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Every linear layer of a block, few and many rows, and the head on the rows it sees."""
    hidden, heads_width = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    mxfp8 = {
        "wq_b": (heads_width, sizes.q_lora_rank),
        "wo_b": (hidden, sizes.o_groups * sizes.o_lora_rank),
        "wq_a": (sizes.q_lora_rank, hidden),
        "wkv": (sizes.head_dim, hidden),
        "shared w1": (sizes.intermediate_size, hidden),
        "shared w2": (hidden, sizes.intermediate_size),
    }
    found = [_plain("head", rows, sizes.vocab_size, hidden) for rows in sizes.head_rows]
    for rows in sizes.rows:
        found += [_mxfp8(name, rows, *shape) for name, shape in mxfp8.items()]
        found.append(_grouped(rows, sizes.o_groups, sizes.o_lora_rank, heads_width // sizes.o_groups))
        found.append(_plain("compressor", rows, sizes.head_dim, hidden))
    return found


if __name__ == "__main__":
    run_bench("linear", cases)
