"""Number formats as TileLang expressions: exact values of packed codes, and MXFP8 rounding, in fp32 registers.

Each function takes and returns expressions, so that a kernel writes ``e4m3_value(code)`` where it needs the number.
The bits of a code, put where fp32 keeps the lowest exponent bits and the highest mantissa bits, are the value times a
power of two, subnormal codes included; one exact product takes that factor away. Integers are int32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import tilelang.language as T

_NAN_BITS = 0x7FC00000
_EXPONENT_BITS = 0x7F800000
_SIGN_BIT = -0x80000000


def as_float(bits):
    """fp32 of the same 32 bits."""
    return T.reinterpret(bits, T.float32)


def as_int(value):
    """int32 of the same 32 bits."""
    return T.reinterpret(value, T.int32)


def byte_of(word, index):
    """Byte ``index`` of an int32 word, the lowest first: 0 to 255."""
    return (word >> (index * 8)) & 255


def e4m3_value(code):
    """fp32 of an e4m3 code; its two NaN codes read as 480, since records hold them only under a NaN scale."""
    return as_float(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * T.float32(2.0**120)


def e8m0_value(code):
    """2^(code - 127): 0 is the subnormal 2^-127, 255 is NaN."""
    bits = T.if_then_else(code == 0, T.int32(0x00400000), code << 23)
    return as_float(T.if_then_else(code == 255, T.int32(_NAN_BITS), bits))


def e2m1_value(code):
    """fp32 of an e2m1 code 0 to 15."""
    return as_float(((code & 8) << 28) | ((code & 7) << 22)) * T.float32(2.0**126)


def keep_nan_between(value, low, high):
    """``value`` clamped; NaN stays, which fmin and fmax would drop."""
    return T.if_then_else(value > high, high, T.if_then_else(value < low, low, value))


def mxfp8_exponent(amax_bits):
    """Biased exponent of the scale of a block; ``amax_bits``: the largest magnitude as int32, NaN on top."""
    floor_bits = T.int32(0x38D1B717)  # 1e-4
    ratio = as_float(T.max(amax_bits, floor_bits)) * T.float32(1.0 / 448.0)
    return (T.min(as_int(ratio), T.int32(_EXPONENT_BITS)) + 0x7FFFFF) >> 23


def mxfp8_round(value, exponent):
    """fp32 ``value`` rounded to e4m3 times 2^(exponent - 127), ties to even, at most 448 of them; NaN stays."""
    inverse = as_float(T.if_then_else(exponent == 255, T.int32(0), (254 - exponent) << 23))
    scaled = keep_nan_between(value * inverse, T.float32(-448.0), T.float32(448.0))
    bits = as_int(scaled)
    magnitude = as_float(bits & 0x7FFFFFFF)
    binade = T.max(bits & _EXPONENT_BITS, T.int32(121 << 23))  # below 2^-6 the codes stand as far apart as at 2^-6
    # Codes stand binade / 8 apart: adding and taking away 2^20 binades rounds to a multiple of that, ties to even. As
    # named operations: TileLang takes (a + b) - b for a.
    shift = as_float(binade + (20 << 23))
    rounded = T.ieee_sub(T.ieee_add(magnitude, shift), shift)
    signed = as_float(as_int(rounded) | (bits & T.int32(_SIGN_BIT)))
    return signed * as_float(exponent << 23)


def turned_pair(word, code):
    """Two bf16 numbers in an int32: code ``code`` (0 to 3) of both 16-bit words of ``word``, times 2^-126."""
    left, right = T.max(6 - 4 * code, 0), T.max(4 * code - 6, 0)
    return (((word << left) >> right) & 0x01C001C0) | ((word << (12 - 4 * code)) & -0x7FFF8000)


def weight_factor(code):
    """Twice in an int32 the bf16 number that makes ``turned_pair`` a weight over WEIGHT_SHIFT, for an E8M0 byte.

    Exact for bytes 26 to 144, as in ``triton_formats``; above, infinite, and NaN for byte 255.
    """
    bits = T.min(code + 110, 255) << 7  # exponent of 2^(code - 127) * 2^126 / 2^16
    bits = T.if_then_else(code == 255, T.int32(0x7FC0), bits)
    return bits | (bits << 16)


def scaled_pair(pair, factor):
    """Products of both bf16 halves, as an int32."""
    return as_int(T.mul2(T.reinterpret(pair, "bfloat16x2"), T.reinterpret(factor, "bfloat16x2")))
