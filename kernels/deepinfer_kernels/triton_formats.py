"""Triton helpers for the number formats: exact unpacking to bf16 in registers, and exact quantisation.

Unpacking works on 16-bit words, because a word tensor then has the register layout of the bf16 operand it becomes and
goes to the tensor core without passing through shared memory again. A word holds 2 e4m3 or 4 e2m1 codes; code r of
every word goes to result r, so a matmul sees the columns of a block in the order r = 0, 1, ... The activations are
written in the same order (``linear/prepare_kernel.py``), and the order is the same in every tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

# The bit pattern of a code, moved to the place of bf16's exponent and mantissa, is the value times a power of two
# (2^-120 for e4m3, 2^-126 for e2m1), subnormal codes included. The first product takes it away, the second applies the
# scale; both are exact. mul.bf16x2 keeps subnormal numbers.
_UNPACK_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    mov.b32 e, 0x7B807B80;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 8;
    shr.b32 c, $2, 4;
    and.b32 b, b, 0x80008000;
    and.b32 d, $2, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    lop3.b32 c, c, 0x07F007F0, d, 0xEA;
    mul.rn.bf16x2 a, a, e;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, c, $3;
    }"""
)

_UNPACK_E2M1 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, p, q, r, e;
    mov.b32 e, 0x7E807E80;
    shl.b32 a, $4, 6;
    shl.b32 p, $4, 12;
    shl.b32 b, $4, 2;
    shl.b32 q, $4, 8;
    shr.b32 c, $4, 2;
    shl.b32 r, $4, 4;
    shr.b32 d, $4, 6;
    and.b32 p, p, 0x80008000;
    and.b32 q, q, 0x80008000;
    and.b32 r, r, 0x80008000;
    lop3.b32 a, a, 0x01C001C0, p, 0xEA;
    lop3.b32 b, b, 0x01C001C0, q, 0xEA;
    lop3.b32 c, c, 0x01C001C0, r, 0xEA;
    and.b32 p, $4, 0x80008000;
    lop3.b32 d, d, 0x01C001C0, p, 0xEA;
    mul.rn.bf16x2 a, a, e;
    mul.rn.bf16x2 b, b, e;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 d, d, e;
    mul.rn.bf16x2 $0, a, $5;
    mul.rn.bf16x2 $1, b, $5;
    mul.rn.bf16x2 $2, c, $5;
    mul.rn.bf16x2 $3, d, $5;
    }"""
)


@triton.jit
def scale_to_bf16(scale):
    """2^(byte - 127) for E8M0 bytes, exact: byte 0 is subnormal, byte 255 is NaN."""
    byte = scale.to(tl.int32)
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def spread_scale(scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """bf16 scales [ROWS, BLOCKS * WORDS] of the words, from bytes [ROWS, BLOCKS]."""
    values = scale_to_bf16(scale)
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, BLOCKS, WORDS]), [ROWS, BLOCKS * WORDS])


@triton.jit
def unpack_e4m3(words, scale):
    """Two bf16 tensors: codes 0 and 1 of every int16 word, times the scale of the word."""
    return tl.inline_asm_elementwise(
        _UNPACK_E4M3, "=r,=r,r,r", [words, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def unpack_e2m1(words, scale):
    """Four bf16 tensors: codes 0 to 3 of every int16 word, lowest nibble first, times the scale of the word."""
    return tl.inline_asm_elementwise(
        _UNPACK_E2M1,
        "=r,=r,=r,=r,r,r",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def clamp_nan(x, low, high):
    """min(max(x, low), high) that keeps NaN."""
    raised = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32: ordered like the values, infinity above them, NaN on top, so that a maximum keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_ceiling(amax_bits, floor, reciprocal):
    """Biased exponent of the smallest power of two not below max(amax, floor) * reciprocal; 255 for NaN or infinity."""
    floor_bits = (tl.zeros_like(amax_bits).to(tl.float32) + floor).to(tl.int32, bitcast=True)
    ratio = tl.maximum(amax_bits, floor_bits).to(tl.float32, bitcast=True) * reciprocal
    bits = tl.minimum(ratio.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    return (bits + 0x7FFFFF) >> 23


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) in fp32; 255 gives infinity."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_power(exponent):
    """2^(127 - exponent) in fp32, exact for 1 to 253; 255 gives 0."""
    bits = tl.where(exponent == 255, 0, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_codes(x, exponent):
    """e4m3 numbers nearest to x / 2^(exponent - 127), ties to even, clamped to 448. ``x`` fp32, ``exponent`` alike."""
    return clamp_nan(x * reciprocal_power(exponent), -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def mxfp8_round(x, amax_bits):
    """fp32 values of MXFP8 codes for fp32 ``x``; ``amax_bits`` broadcasts against it: magnitude_bits' block maximum."""
    exponent = exponent_ceiling(amax_bits, 1e-4, 1.0 / 448.0)
    return e4m3_codes(x, exponent).to(tl.float32) * power_of_two(exponent)


@triton.jit
def e2m1_magnitude(x):
    """|x| rounded to e2m1, ties to the even code, at most 6; NaN stays."""
    magnitude = tl.minimum(tl.abs(x), 6.0, propagate_nan=tl.PropagateNan.ALL)
    binade = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000  # bits of 1, 2 or 4
    # Values stand binade / 2 apart: adding and taking away 2^23 rounds multiples of it to the nearest, ties to even.
    whole = (magnitude * (0x7F800000 - binade).to(tl.float32, bitcast=True) + 8388608.0) - 8388608.0
    return whole * (binade - 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(x, magnitude):
    """4-bit codes int32 of rounded magnitudes, with the sign of ``x``."""
    from_one = (magnitude.to(tl.int32, bitcast=True) >> 22) - 252  # exponent and first mantissa bit; 1.0 has code 2
    code = tl.where(magnitude < 1.0, (magnitude + magnitude).to(tl.int32), from_one) & 7
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def with_sign_of(magnitude, x):
    """``magnitude``, not negative, with the sign bit of ``x``."""
    return (magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def pack_nibbles(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """uint8 [ROWS, WIDTH / 2] of 4-bit codes int32 [ROWS, WIDTH], even column in the low nibble."""
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDTH // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def nvfp4_scale(amax_bits, floor):
    """e4m3 number nearest to max(amax, floor) / 6 (IEEE division), at most 448; NaN stays."""
    floor_bits = (tl.zeros_like(amax_bits).to(tl.float32) + floor).to(tl.int32, bitcast=True)
    amax = tl.maximum(amax_bits, floor_bits).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(amax, tl.zeros_like(amax) + 6.0)
    return tl.minimum(ratio, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
