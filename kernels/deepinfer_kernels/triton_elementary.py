"""``elementary`` for Triton kernels, and the order of logits as integers. Launch with ``enable_fp_fusion=False``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

from deepinfer_kernels import elementary

_LOG2_E = tl.constexpr(elementary.LOG2_E)
_LN2_HIGH_FP32 = tl.constexpr(elementary.LN2_HIGH_FP32)
_LN2_LOW_FP32 = tl.constexpr(elementary.LN2_LOW_FP32)
_EXP_LEAST = tl.constexpr(elementary.EXP_LEAST)
_EXP_TERMS = tl.constexpr(elementary.EXP_TERMS[::-1])
_NUM_EXP_TERMS = tl.constexpr(len(elementary.EXP_TERMS))
_LN2_HIGH_FP64 = tl.constexpr(elementary.LN2_HIGH_FP64)
_LN2_LOW_FP64 = tl.constexpr(elementary.LN2_LOW_FP64)
_ARTANH_TERMS = tl.constexpr(elementary.ARTANH_TERMS[::-1])
_NUM_ARTANH_TERMS = tl.constexpr(len(elementary.ARTANH_TERMS))
_SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
_UP_TO_ONE = tl.constexpr(elementary.ONE_BITS - elementary.SQRT_HALF_BITS)
_FRACTION_MASK = tl.constexpr(elementary.FRACTION_MASK)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds an fp32 number below 2^22 to an integer, ties to even


@triton.jit
def exp_nonpositive(x):
    """exp(x) of fp32 values up to 0; 0 below -87. NaN gives an unspecified value."""
    bounded = tl.maximum(x, _EXP_LEAST)
    exponent = (bounded * _LOG2_E + _ROUND) - _ROUND
    rest = (bounded - exponent * _LN2_HIGH_FP32) - exponent * _LN2_LOW_FP32
    tail = rest * _EXP_TERMS[0]
    for i in tl.static_range(1, _NUM_EXP_TERMS):
        tail = (tail + _EXP_TERMS[i]) * rest
    value = 1.0 + (rest + tail * rest)
    power = ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_LEAST, 0.0, value * power)


@triton.jit
def log_positive(x):
    """Natural logarithm of fp64 positive normal numbers."""
    shifted = x.to(tl.int64, bitcast=True) + _UP_TO_ONE
    exponent = ((shifted >> 52) - 1023).to(tl.float64)
    fraction = ((shifted & _FRACTION_MASK) + _SQRT_HALF_BITS).to(tl.float64, bitcast=True)
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    tail = square * _ARTANH_TERMS[0]
    for i in tl.static_range(1, _NUM_ARTANH_TERMS):
        tail = (tail + _ARTANH_TERMS[i]) * square
    twice = s + s
    return exponent * _LN2_HIGH_FP64 + (twice + (exponent * _LN2_LOW_FP64 + twice * tail))


@triton.jit
def ordered_key(value):
    """uint32 that orders as fp32 values do; both zeros are equal, -inf and NaN give 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(value > -float("inf"), ordered, 0).to(tl.uint32)


@triton.jit
def value_of_key(key):
    """The fp32 value of a key other than 0."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
