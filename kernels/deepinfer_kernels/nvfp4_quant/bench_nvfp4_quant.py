"""Bench of the NVFP4 quantiser: ``python -m deepinfer_kernels.nvfp4_quant.bench_nvfp4_quant``."""

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_quant import quant_cases
from deepinfer_kernels.bench_sizes import Sizes
from deepinfer_kernels.nvfp4_quant import nvfp4_fake_quant, nvfp4_quant


def cases(sizes: Sizes) -> list[Case]:
    """Hidden states to codes, and to codes and back."""
    return quant_cases("nvfp4_quant", nvfp4_quant, nvfp4_fake_quant, 4, 16, sizes)


if __name__ == "__main__":
    run_bench("nvfp4_quant", cases)
