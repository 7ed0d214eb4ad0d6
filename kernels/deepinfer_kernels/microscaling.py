"""Numbers of the MX and NVFP4 formats: E8M0 scales, and e2m1 values packed two to a byte."""

from functools import cache

import torch

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0

_MANTISSA_MASK = 0x007FFFFF
_EXPONENT_MASK = 0x7F800000  # also the bits of infinity
_MANTISSA_BITS = 23


def exponent_ceiling_bytes(ratio: torch.Tensor) -> torch.Tensor:
    """Smallest power of two not below ``ratio``, as a biased exponent.

    Args:
        ratio: fp32, positive normal numbers; NaN or infinity give 255, the NaN of E8M0.

    Returns:
        int32, the exponent of the power of two + 127, taken from the bits: no logarithm, no rounding.
    """
    bits = ratio.view(torch.int32).clamp_max(_EXPONENT_MASK)
    return bits.add_(_MANTISSA_MASK).bitwise_right_shift_(_MANTISSA_BITS)


def power_of_two(exponent_bytes: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in fp32 for int32 bytes 1 to 254; 255 gives infinity, which turns a block into NaN."""
    return exponent_bytes.bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in fp32 for every uint8 byte; 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 value, ties to the even code, saturating at 6; fp32 to a new fp32, zeros keep the sign of ``x``."""
    clamped = x.clamp(-E2M1_MAX, E2M1_MAX)
    # Values stand 1/2 apart below 2, 1 apart up to 4, 2 apart up to 6: half of the power of two below |x|, or of 1.
    binade = clamped.abs().clamp_min_(1.0).view(torch.int32).bitwise_and_(_EXPONENT_MASK).view(torch.float32)
    step = binade.mul_(0.5)
    return clamped.div_(step).round_().mul_(step)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Pack fp32 [..., K] that are e2m1 values already into uint8 [..., K/2], even column in the low nibble."""
    magnitude = values.abs()
    # From 1 on, exponent and first mantissa bit of fp32 are the code plus a constant (1.0 has code 2).
    from_one = magnitude.view(torch.int32).bitwise_right_shift(_MANTISSA_BITS - 1).sub_((127 << 1) - 2)
    codes = torch.where(magnitude < 1.0, (magnitude + magnitude).int(), from_one).bitwise_and_(7)
    codes |= values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    pairs = torch.unflatten(codes, -1, (values.shape[-1] // 2, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


@cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """[256, 2] fp32: the values of the low and the high nibble of every byte."""
    values = torch.tensor(_E2M1_MAGNITUDES + tuple(-magnitude for magnitude in _E2M1_MAGNITUDES))
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values of uint8 [..., K/2] as fp32 [..., K], low nibble first."""
    return _pair_table(packed.device)[packed.int()].flatten(-2)
