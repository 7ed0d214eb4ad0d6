"""Bench of the linear layers at the shapes of DeepSeek-V4.1-Flash: ``python -m deepinfer_kernels.linear.bench_linear``.

Ratios count the packed weight, its scales, the rows and the result; the time includes quantising the rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from deepinfer_kernels.bench import Ceilings, Record, measure, rotation, run_bench
from deepinfer_kernels.linear import grouped_linear, linear, mxfp8_linear

Calls = Sequence[Callable[[], object]]

NARROW_ROWS = (1, 16, 64)
WIDE_ROWS = (256, 4096)
# name: outputs, K
MXFP8_SHAPES = {
    "wq_a": (1280, 5120),
    "wq_b": (32768, 1280),
    "wkv": (512, 5120),
    "wo_b": (5120, 8192),
    "shared w1": (2304, 5120),
    "shared w2": (5120, 2304),
}
PLAIN_SHAPES = {"head": (129280, 5120), "compressor": (512, 5120), "router": (384, 5120)}
GROUPED_SHAPE = (8, 1024, 4096)  # wo_a: groups, outputs of a group, K of a group
HEAD_ROWS_LIMIT = 256  # the head sees sampled rows only


def _codes(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def _scales(*shape: int) -> torch.Tensor:
    return torch.randint(116, 124, shape, device="cuda", dtype=torch.uint8)


def _mxfp8_case(num_rows: int, num_out: int, depth: int) -> tuple[Calls, int]:
    sets = rotation(num_out * depth)
    weights = [(_codes(num_out, depth), _scales(num_out // 32, depth // 32)) for _ in range(sets)]
    x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    calls = [partial(mxfp8_linear, x, w, s, out_dtype=torch.bfloat16, quantize_input=True) for w, s in weights]
    return calls, num_out * depth * 1025 // 1024 + 2 * num_rows * (depth + num_out)


def _grouped_case(num_rows: int) -> tuple[Calls, int]:
    groups, num_out, depth = GROUPED_SHAPE
    weights = [
        (_codes(groups * num_out, depth), _scales(groups * num_out // 32, depth // 32))
        for _ in range(rotation(groups * num_out * depth))
    ]
    x = torch.randn(num_rows, groups, depth, device="cuda", dtype=torch.bfloat16)
    calls = [partial(grouped_linear, x, w, s, out_dtype=torch.bfloat16) for w, s in weights]
    return calls, groups * num_out * depth * 1025 // 1024 + 2 * num_rows * groups * (depth + num_out)


def _plain_case(num_rows: int, num_out: int, depth: int) -> tuple[Calls, int]:
    weights = [
        torch.randn(num_out, depth, device="cuda", dtype=torch.bfloat16) for _ in range(rotation(2 * num_out * depth))
    ]
    x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    calls = [partial(linear, x, w, out_dtype=torch.float32) for w in weights]
    return calls, 2 * num_out * depth + num_rows * (2 * depth + 4 * num_out)


def cases(ceilings: Ceilings) -> list[Record]:
    """All shapes, few and many rows."""
    records = []

    def add(op: str, name: str, num_rows: int, made: tuple[Calls, int], weights: int) -> None:
        calls, num_bytes = made
        flops = 2 * num_rows * weights
        records.append(measure(op, f"{name} M={num_rows}", calls, num_bytes=num_bytes, flops=flops, ceilings=ceilings))

    for num_rows in (*NARROW_ROWS, *WIDE_ROWS):
        for name, (num_out, depth) in MXFP8_SHAPES.items():
            add("mxfp8_linear", name, num_rows, _mxfp8_case(num_rows, num_out, depth), num_out * depth)
        groups, num_out, depth = GROUPED_SHAPE
        add("grouped_linear", "wo_a", num_rows, _grouped_case(num_rows), groups * num_out * depth)
        for name, (num_out, depth) in PLAIN_SHAPES.items():
            if name != "head" or num_rows <= HEAD_ROWS_LIMIT:
                add("linear", name, num_rows, _plain_case(num_rows, num_out, depth), num_out * depth)
    return records


if __name__ == "__main__":
    run_bench("linear", cases)
