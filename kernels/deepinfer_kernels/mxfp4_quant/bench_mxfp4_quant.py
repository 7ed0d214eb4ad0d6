"""Bench of the MXFP4 quantiser: ``python -m deepinfer_kernels.mxfp4_quant.bench_mxfp4_quant``."""

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_quant import quant_cases
from deepinfer_kernels.bench_sizes import Sizes
from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant, mxfp4_quant


def cases(sizes: Sizes) -> list[Case]:
    """Hidden states to codes, and to codes and back."""
    return quant_cases("mxfp4_quant", mxfp4_quant, mxfp4_fake_quant, 4, 32, sizes)


if __name__ == "__main__":
    run_bench("mxfp4_quant", cases)
