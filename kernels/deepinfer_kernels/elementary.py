"""Exponential and logarithm of the sampler in IEEE operations alone: one set of bits on every device.

A library's exp and log differ between a CPU and a GPU, and between two versions of a library. These are products, sums
and one quotient, each rounded once and none fused; ``triton_elementary`` repeats them operation by operation.
"""

import torch

LOG2_E = 1.4426950408889634
# ln 2 in two parts. The high one has 9 bits, so that its product with an exponent of fp32 is exact.
LN2_HIGH_FP32 = 0.693359375
LN2_LOW_FP32 = -2.12194440054690583e-4
# 1/2!, 1/3!, ... 1/7!: on |r| <= ln(2) / 2 the first term left out is below 2^-27 of the sum.
EXP_TERMS = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
# Below it exp counts as 0; at it the result is still a normal number.
EXP_LEAST = -87.0

# ln 2 in two parts for fp64; the high one has 32 bits.
LN2_HIGH_FP64 = float.fromhex("0x1.62e42feep-1")
LN2_LOW_FP64 = float.fromhex("0x1.a39ef35793c76p-33")
# 1/3, 1/5, ... 1/19 of artanh's series: with s^2 <= 0.0295 the first term left out is below 2^-55 of the sum.
ARTANH_TERMS = tuple(1.0 / n for n in range(3, 20, 2))
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
ONE_BITS = 0x3FF0000000000000
FRACTION_BITS = 52
FRACTION_MASK = (1 << FRACTION_BITS) - 1


def exp_nonpositive(x: torch.Tensor) -> torch.Tensor:
    """exp(x) of an fp32 tensor of values up to 0, within 2 units in the last place; 0 below -87.

    NaN gives an unspecified value: replace it where it can occur.
    """
    bounded = x.clamp_min(EXP_LEAST)
    exponent = torch.round(bounded * LOG2_E)
    rest = (bounded - exponent * LN2_HIGH_FP32) - exponent * LN2_LOW_FP32
    tail = rest * EXP_TERMS[-1]
    for term in EXP_TERMS[-2::-1]:
        tail = (tail + term) * rest
    value = 1.0 + (rest + tail * rest)
    power = ((exponent.int() + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_LEAST, 0.0, value * power)


def log_positive(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of an fp64 tensor of positive normal numbers, within 2 units in the last place."""
    shifted = x.view(torch.int64) + (ONE_BITS - SQRT_HALF_BITS)
    exponent = ((shifted >> FRACTION_BITS) - 1023).double()
    fraction = ((shifted & FRACTION_MASK) + SQRT_HALF_BITS).view(torch.float64)  # from sqrt(1/2) to sqrt(2)
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    tail = square * ARTANH_TERMS[-1]
    for term in ARTANH_TERMS[-2::-1]:
        tail = (tail + term) * square
    twice = s + s
    return exponent * LN2_HIGH_FP64 + (twice + (exponent * LN2_LOW_FP64 + twice * tail))
