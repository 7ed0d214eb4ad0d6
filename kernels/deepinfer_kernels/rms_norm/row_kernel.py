"""The norm of one row in registers, for the kernels that put a norm between two products."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

from deepinfer_kernels.triton_sums import row_sum

# Columns of a row that are added last: 256 threads of 8 values each.
NORM_FOLD = tl.constexpr(2048)


@triton.jit
def normed(x, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 of one row [BLOCK], zero behind WIDTH, times the reciprocal of its root mean square and ``weight``."""
    mean_square = tl.div_rn(row_sum(x * x, BLOCK, NORM_FOLD), WIDTH * 1.0)
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps)) * weight
