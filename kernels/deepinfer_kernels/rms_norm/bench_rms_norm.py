"""Bench of the norms: hidden states, low-rank queries, latents.

Run with ``python -m deepinfer_kernels.rms_norm.bench_rms_norm``.
"""

from functools import partial

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16
from deepinfer_kernels.rms_norm import rms_norm

EPS = 1e-20


def _case(num_rows: int, width: int) -> Case:
    return Case(
        op="rms_norm",
        name=f"{num_rows} x {width}",
        num_bytes=2 * width * (2 * num_rows + 1),
        flops=4 * num_rows * width,
        make=lambda device: partial(rms_norm, bf16(device, num_rows, width), bf16(device, width), EPS),
    )


def cases(sizes: Sizes) -> list[Case]:
    """Every width that the model norms, few and many rows."""
    return [
        _case(rows, width) for width in (sizes.hidden_size, sizes.q_lora_rank, sizes.head_dim) for rows in sizes.rows
    ]


if __name__ == "__main__":
    run_bench("rms_norm", cases)
