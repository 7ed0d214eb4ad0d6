"""The total order of scores as unsigned integers."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl


@triton.jit
def ordered_key(score):
    """uint32 that orders as fp32 scores do; both zeros are equal, -inf and NaN give 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(score > -float("inf"), ordered, 0).to(tl.uint32)
