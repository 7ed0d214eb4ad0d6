"""Triton helpers for the number formats: exact unpacking to bf16 in registers, and exact quantisation.

Unpacking works on 16-bit words, because a word tensor then has the register layout of the bf16 operand it becomes and
goes to the tensor core without passing through shared memory again. A word holds 2 e4m3 or 4 e2m1 codes; the codes r of
all words of a block of 128 columns follow each other, so a matmul sees the columns in the order r = 0, 1, ... The
activations are written in the same order (``linear/prepare_kernel.py``), and it is the same in every tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

# The bit pattern of a code, moved to the place of bf16's exponent and mantissa, is the value times a power of two
# (2^-120 for e4m3, 2^-126 for e2m1), subnormal codes included; mul.bf16x2 keeps subnormal numbers. One exact product
# takes that factor away and applies the scale. So that scales above 1 fit as well, weights stay WEIGHT_SHIFT smaller
# until the sum is done. Exact for scale bytes 26 to 144 (2^-101 to 2^17); above, the result is infinite or NaN. The two
# NaN codes of e4m3 are not looked for and read as 480 times the scale: no checkpoint holds them.
WEIGHT_SHIFT = 2.0**16

_UNPACK_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 8;
    shr.b32 c, $2, 4;
    and.b32 b, b, 0x80008000;
    and.b32 d, $2, 0x80008000;
    lop3.b32 a, a, 0x07F007F0, b, 0xEA;
    lop3.b32 c, c, 0x07F007F0, d, 0xEA;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, c, $3;
    }"""
)

_UNPACK_E2M1 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, p, q, r;
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
    mul.rn.bf16x2 $0, a, $5;
    mul.rn.bf16x2 $1, b, $5;
    mul.rn.bf16x2 $2, c, $5;
    mul.rn.bf16x2 $3, d, $5;
    }"""
)

# Four E8M0 bytes to bf16 times a power of two in both halves of $5. Byte 255 becomes infinity and then, with the sum of
# its product with 0, NaN.
_SCALES = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, z;
    mov.b32 z, 0;
    shl.b32 a, $4, 7;
    shr.b32 b, $4, 1;
    and.b32 a, a, 0x7F807F80;
    and.b32 b, b, 0x7F807F80;
    mul.rn.bf16x2 c, a, $5;
    mul.rn.bf16x2 d, b, $5;
    fma.rn.bf16x2 c, a, z, c;
    fma.rn.bf16x2 d, b, z, d;
    mov.b32 {$0, $2}, c;
    mov.b32 {$1, $3}, d;
    }"""
)
_E4M3_FACTOR = tl.constexpr(0x73807380)  # 2^120 / WEIGHT_SHIFT, twice in bf16
_E2M1_FACTOR = tl.constexpr(0x76807680)  # 2^126 / WEIGHT_SHIFT


@triton.jit
def _spread(a, b, c, d, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """[ROWS, 4 * WORDS]: a for the first WORDS columns, then b, c, d."""
    values = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, 4])
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, 4, WORDS]), [ROWS, 4 * WORDS])


@triton.jit
def _scales(packed, FACTOR: tl.constexpr):
    return tl.inline_asm_elementwise(
        _SCALES,
        "=h,=h,=h,=h,r,r",
        [packed, FACTOR],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def unpack_e4m3(words, packed_scale, ROWS: tl.constexpr):
    """A bf16 tensor [ROWS, 128] from int16 words [ROWS, 64]: code 0 of every word, then code 1.

    ``packed_scale``: int32 [ROWS], the scale bytes of the four blocks of 32 columns, lowest first. Values are
    WEIGHT_SHIFT smaller than the weight.
    """
    a, b, c, d = _scales(packed_scale, _E4M3_FACTOR)
    w0, w1 = tl.inline_asm_elementwise(
        _UNPACK_E4M3,
        "=r,=r,r,r",
        [words, _spread(a, b, c, d, ROWS, 16)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    return tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), [ROWS, 128])


@triton.jit
def unpack_e2m1(words, packed_scale, ROWS: tl.constexpr):
    """The same from words of four e2m1 codes [ROWS, 32], lowest nibble first: codes 0 of all words to codes 3."""
    a, b, c, d = _scales(packed_scale, _E2M1_FACTOR)
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        _UNPACK_E2M1,
        "=r,=r,=r,=r,r,r",
        [words, _spread(a, b, c, d, ROWS, 8)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    four = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [ROWS, 32, 2, 2]: word, low and high bit of the code's number
    return tl.reshape(tl.permute(four, (0, 3, 2, 1)), [ROWS, 128])


@triton.jit
def load_packed_scale(scale_ptrs, start, K: tl.constexpr, PADDED_K: tl.constexpr):
    """int32 [ROWS], the four scale bytes of the 128 columns from ``start`` on; zeros behind K.

    Bytes are loaded one by one only where the rows of scales are no multiples of 4 bytes: narrow loads are not
    pipelined.
    """
    if K == PADDED_K:
        return tl.load(scale_ptrs.to(tl.pointer_type(tl.int32)) + start // 128)
    first = start // 32
    packed = tl.load(scale_ptrs + first).to(tl.int32)
    for index in tl.static_range(1, 4):
        byte = tl.load(scale_ptrs + (first + index), mask=first + index < K // 32, other=0)
        packed |= byte.to(tl.int32) << (8 * index)
    return packed


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
