"""Cases that the benches of all quantisers share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepinfer_kernels.bench import Case
from deepinfer_kernels.bench_sizes import Sizes, bf16

Quant = Callable[..., Any]


def quant_cases(op: str, quant: Quant, fake_quant: Quant, bits: int, group: int, sizes: Sizes) -> list[Case]:
    """Hidden states to codes of ``bits`` with a scale byte per ``group`` values, and to codes and back."""
    found, width = [], sizes.hidden_size
    for num_rows in sizes.rows:
        values = num_rows * width
        found.append(
            Case(
                op=op,
                name=f"to codes {num_rows} x {width}",
                num_bytes=2 * values + values * bits // 8 + values // group,
                flops=3 * values,
                make=partial(_bound, quant, num_rows, width),
            )
        )
        found.append(
            Case(
                op=op,
                name=f"and back {num_rows} x {width}",
                num_bytes=4 * values,
                flops=4 * values,
                make=partial(_bound, fake_quant, num_rows, width),
            )
        )
    return found


def _bound(function: Quant, num_rows: int, width: int, device: str) -> Quant:
    return partial(function, bf16(device, num_rows, width))
