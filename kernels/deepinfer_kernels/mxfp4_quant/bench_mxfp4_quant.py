"""Bench of the MXFP4 quantiser: ``python -m deepinfer_kernels.mxfp4_quant.bench_mxfp4_quant``."""

from functools import partial

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant, mxfp4_quant


def _cases(num_rows: int, width: int) -> list[Case]:
    values = num_rows * width
    packed = num_rows * (width // 2 + width // 32)
    return [
        Case(
            op="mxfp4_quant",
            name=f"to codes {num_rows} x {width}",
            num_bytes=2 * values + packed,
            flops=3 * values,
            make=lambda device: partial(mxfp4_quant, bf16(device, num_rows, width)),
        ),
        Case(
            op="mxfp4_quant",
            name=f"and back {num_rows} x {width}",
            num_bytes=4 * values,
            flops=4 * values,
            make=lambda device: partial(mxfp4_fake_quant, bf16(device, num_rows, width)),
        ),
    ]


def cases(sizes: Sizes) -> list[Case]:
    """Hidden states to codes, and to codes and back."""
    return [case for rows in sizes.rows for case in _cases(rows, sizes.hidden_size)]


if __name__ == "__main__":
    run_bench("mxfp4_quant", cases)
