"""Records in registers: encoders and decoders that the Triton kernels of caches, attention and index share.

``FMT`` is the code of a ``RecordFormat`` (``FORMAT_CODES``). All are exact copies of the references' arithmetic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

from deepinfer_kernels.kv_store.record_format import RecordFormat

FORMAT_CODES = {RecordFormat.FP32: 0, RecordFormat.MXFP8: 1, RecordFormat.NVFP4: 2, RecordFormat.MXFP4: 3}

_FP32 = tl.constexpr(0)
_MXFP8 = tl.constexpr(1)
_NVFP4 = tl.constexpr(2)

_EXPONENT_MASK = tl.constexpr(0x7F800000)
_MANTISSA_MASK = tl.constexpr(0x007FFFFF)
_MANTISSA_BITS = tl.constexpr(23)

# Four bytes of e2m1 pairs in $4, with their scales in $5 and $6, to even values in $0 and $1 and odd ones in $2 and $3;
# see ``unpack_nibbles``.
UNPACK_PAIRS = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    mov.b32 e, 0x7E807E80;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 c, a, 6;
    shl.b32 d, b, 6;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x01C001C0;
    shl.b32 $0, a, 12;
    shl.b32 $1, b, 12;
    lop3.b32 c, $0, 0x80008000, c, 0xEA;
    lop3.b32 d, $1, 0x80008000, d, 0xEA;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 d, d, e;
    mul.rn.bf16x2 $0, c, $5;
    mul.rn.bf16x2 $1, d, $6;
    shl.b32 c, a, 2;
    shl.b32 d, b, 2;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x01C001C0;
    shl.b32 a, a, 8;
    shl.b32 b, b, 8;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mul.rn.bf16x2 c, c, e;
    mul.rn.bf16x2 d, d, e;
    mul.rn.bf16x2 $2, c, $5;
    mul.rn.bf16x2 $3, d, $6;
    }"""
)


@triton.jit
def e8m0_to_float(byte):
    """2^(byte - 127) of uint8 bytes; 255 is NaN, 0 the subnormal 2^-127."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << _MANTISSA_BITS)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float(code):
    """Values of int32 codes 0 to 15."""
    magnitude = code & 7
    from_one = (((magnitude >> 1) + 126) << _MANTISSA_BITS) | ((magnitude & 1) << (_MANTISSA_BITS - 1))
    half = magnitude.to(tl.float32) * 0.5  # below 1 the codes count halves
    value = tl.where(magnitude < 2, half, from_one.to(tl.float32, bitcast=True))
    # The sign as a bit: in Triton -x is 0 - x, which loses the sign of a zero.
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _code_of(x):
    """e2m1 code of fp32, ties to the even code, saturating at 6; the sign is that of ``x``, also of a zero."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _amax(groups, FLOOR: tl.constexpr):
    """Largest magnitude of each group [..., n] -> [..., 1], at least FLOOR. Compared as integers: NaN is largest."""
    bits = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    return tl.where(amax < FLOOR, FLOOR, amax)


@triton.jit
def _exponent_ceiling(ratio):
    """Biased exponent of the smallest power of two not below ``ratio``; 255 for NaN and infinity."""
    bits = tl.minimum(ratio.to(tl.int32, bitcast=True), _EXPONENT_MASK)
    return (bits + _MANTISSA_MASK) >> _MANTISSA_BITS


@triton.jit
def _divide(groups, scale):
    return tl.div_rn(groups, tl.broadcast_to(scale, groups.shape))


@triton.jit
def encode_mxfp8(groups):
    """fp32 [n, 32] to codes uint8 [n, 32] and scales uint8 [n, 1]."""
    exponent = _exponent_ceiling(_amax(groups, 1e-4) * (1.0 / 448.0))
    scaled = _divide(groups, (exponent << _MANTISSA_BITS).to(tl.float32, bitcast=True))
    scaled = tl.minimum(scaled, 448.0, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), exponent.to(tl.uint8)


@triton.jit
def encode_mxfp4(groups):
    """fp32 [n, 32] to codes int32 [n, 32] and scales uint8 [n, 1]."""
    exponent = _exponent_ceiling(_amax(groups, 7.052966104933725e-38) * (1.0 / 6.0))  # floor 6 * 2^-126
    return _code_of(_divide(groups, (exponent << _MANTISSA_BITS).to(tl.float32, bitcast=True))), exponent.to(tl.uint8)


@triton.jit
def encode_nvfp4(groups):
    """fp32 [n, 16] to codes int32 [n, 16] and e4m3 scales as uint8 [n, 1]."""
    ratio = tl.div_rn(_amax(groups, 0.01171875), 6.0)  # floor 6 * 2^-9
    scale = tl.minimum(ratio, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return _code_of(_divide(groups, scale.to(tl.float32))), scale.to(tl.uint8, bitcast=True)


@triton.jit
def pack_nibbles(codes, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """int32 codes [GROUPS, GROUP] to uint8 [GROUPS, GROUP / 2], even column in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, [GROUPS, GROUP // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def load_fp32(ptr, mask):
    """fp32 values at byte addresses, which need not be multiples of four; zero where masked."""
    bits = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    bits |= tl.load(ptr + 1, mask=mask, other=0).to(tl.int32) << 8
    bits |= tl.load(ptr + 2, mask=mask, other=0).to(tl.int32) << 16
    bits |= tl.load(ptr + 3, mask=mask, other=0).to(tl.int32) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_values(value_ptr, scale_ptr, column, mask, FMT: tl.constexpr):
    """fp32 values of any columns of records whose values and scales start at the given byte addresses.

    One byte per value is read, so that no layout is asked of the caller: for masks, odd widths and the fp32 modes,
    not for speed. A masked value is zero.
    """
    if FMT == _FP32:
        return load_fp32(value_ptr + column * 4, mask)
    if FMT == _MXFP8:
        code = tl.load(value_ptr + column, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return code * e8m0_to_float(tl.load(scale_ptr + column // 32, mask=mask, other=0))
    byte = tl.load(value_ptr + column // 2, mask=mask, other=0).to(tl.int32)
    value = e2m1_to_float((byte >> ((column & 1) * 4)) & 15)
    if FMT == _NVFP4:
        scale = tl.load(scale_ptr + column // 16, mask=mask, other=0)
        return value * scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value * e8m0_to_float(tl.load(scale_ptr + column // 32, mask=mask, other=0))


@triton.jit
def e8m0_to_bf16(byte):
    """2^(byte - 127) in bf16; 255 is NaN, 0 the subnormal 2^-127."""
    exponent = byte.to(tl.int16)
    bits = tl.where(exponent == 0, 0x0040, exponent << 7)
    return tl.where(exponent == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpack_nibbles(byte, scale):
    """Even and odd values, bf16, of packed e2m1 pairs times bf16 scales of the same shape; exact.

    The three magnitude bits of a code, put where bf16 keeps the lowest exponent bits and the highest mantissa bit, are
    the value times 2^-126, also for the subnormal 0.5. Two exact products bring it back: first 2^126, then the scale.
    """
    return tl.inline_asm_elementwise(
        UNPACK_PAIRS,
        "=&r,=&r,=&r,=&r,r,r,r",
        [byte, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
