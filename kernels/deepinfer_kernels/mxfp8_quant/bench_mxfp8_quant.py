"""Bench of the MXFP8 quantiser: ``python -m deepinfer_kernels.mxfp8_quant.bench_mxfp8_quant``."""

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_quant import quant_cases
from deepinfer_kernels.bench_sizes import Sizes
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant, mxfp8_quant


def cases(sizes: Sizes) -> list[Case]:
    """Hidden states to codes, and to codes and back."""
    return quant_cases("mxfp8_quant", mxfp8_quant, mxfp8_fake_quant, 8, 32, sizes)


if __name__ == "__main__":
    run_bench("mxfp8_quant", cases)
