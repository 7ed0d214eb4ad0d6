"""Sums whose order is written in the program, not chosen by the layout the compiler gives a tensor."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl


@triton.jit
def halving_sum(lanes, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of [SIZE], SIZE = 2^LEVELS: the upper half is added to the lower until one value is left."""
    for level in tl.static_range(1, LEVELS):
        lanes = tl.sum(tl.reshape(lanes, [2, SIZE >> level]), axis=0)
    return tl.sum(lanes, axis=0)


@triton.jit
def halving_row_sums(rows, ROWS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Sums [ROWS] of [ROWS, SIZE], SIZE = 2^LEVELS: upper halves of the rows are added to the lower."""
    for level in tl.static_range(1, LEVELS):
        rows = tl.sum(tl.reshape(rows, [ROWS, 2, SIZE >> level]), axis=1)
    return tl.sum(rows, axis=1)


@triton.jit
def row_sum(values, SIZE: tl.constexpr, FOLD: tl.constexpr):
    """Sum of [SIZE], a power of two: upper halves are added to lower ones down to FOLD values, then neighbours.

    The order is that of a wide row in a thread group (first a thread's distant loads, then its neighbouring values,
    then threads), written out, so that kernels that load the row in different layouts give the same bits.
    """
    folded: tl.constexpr = min(SIZE, FOLD)
    for level in tl.static_range(1, 5):
        if (SIZE >> level) >= folded:
            values = tl.sum(tl.reshape(values, [2, SIZE >> level]), axis=0)
    for level in tl.static_range(1, 12):
        if (folded >> level) > 1:
            values = tl.sum(tl.reshape(values, [folded >> level, 2]), axis=1)
    return tl.sum(values, axis=0)
