"""On the device: the quantisers give the codes, scales and values of the references, bit for bit."""

from collections.abc import Callable

import pytest
import torch

from deepinfer_kernels.mxfp4_quant import mxfp4_fake_quant, mxfp4_quant
from deepinfer_kernels.mxfp4_quant.reference import mxfp4_fake_quant_reference, mxfp4_quant_reference
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant, mxfp8_quant
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference, mxfp8_quant_reference
from deepinfer_kernels.nvfp4_quant import nvfp4_fake_quant, nvfp4_quant
from deepinfer_kernels.nvfp4_quant.reference import nvfp4_fake_quant_reference, nvfp4_quant_reference
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FORMATS: dict[str, tuple[Quantise, Quantise]] = {
    "mxfp8": (mxfp8_quant, mxfp8_quant_reference),
    "mxfp4": (mxfp4_quant, mxfp4_quant_reference),
    "nvfp4": (nvfp4_quant, nvfp4_quant_reference),
}
FAKES = {
    "mxfp8": (mxfp8_fake_quant, mxfp8_fake_quant_reference),
    "mxfp4": (mxfp4_fake_quant, mxfp4_fake_quant_reference),
    "nvfp4": (nvfp4_fake_quant, nvfp4_fake_quant_reference),
}


def _finite_bf16() -> torch.Tensor:
    """Every finite bf16 value: in ascending order, where a block spans little, and shuffled."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    values = values[: values.numel() // 128 * 128]
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(61))]
    return torch.cat([values, shuffled]).view(-1, 128)


def _ties() -> torch.Tensor:
    """fp32 blocks whose largest value fixes the scale and whose others lie on, just below and just above every tie."""
    rows = []
    for largest in (6.0, 7.0, 448.0, 5.0, 1.3):
        for exponent in (-20, -7, 0, 5):
            halves = torch.arange(1, 64) * 0.125
            values = torch.cat([halves, halves.nextafter(torch.tensor(9e9)), halves.nextafter(torch.tensor(0.0))])
            values = torch.cat([values, -values, torch.zeros(-2 * values.numel() % 28)]).view(-1, 28)
            block = torch.cat([torch.full((values.shape[0], 4), largest), values.clamp(-largest, largest)], dim=1)
            rows.append(block.repeat(1, 4) * 2.0**exponent)
    return torch.cat(rows)


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(62)
    wide = torch.randn(512, 128, generator=generator) * torch.exp2(torch.randint(-30, 30, (512, 1)).float())
    return {"every bf16": _finite_bf16(), "ties": _ties(), "fp32": wide, "zeros": torch.zeros(3, 128)}


@pytest.mark.parametrize("name", ["every bf16", "ties", "fp32", "zeros"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_scales_and_values_are_those_of_the_reference(fmt: str, name: str) -> None:
    x = _inputs()[name].cuda()
    quantise, reference = FORMATS[fmt]
    codes, scale = quantise(x)
    want_codes, want_scale = reference(x)
    assert_bitwise_equal(scale, want_scale, f"{fmt} scales")
    assert_bitwise_equal(codes.view(torch.uint8), want_codes.view(torch.uint8), f"{fmt} codes")
    fake, fake_reference = FAKES[fmt]
    assert_bitwise_equal(fake(x), fake_reference(x), f"{fmt} values")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_block_that_is_not_finite_is_that_of_the_reference(fmt: str, bad: float) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(63)).cuda()
    x[1, 70] = bad
    fake, fake_reference = FAKES[fmt]
    got, want = fake(x), fake_reference(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert_bitwise_equal(got.nan_to_num(), want.nan_to_num(), f"{fmt} values")
    assert_bitwise_equal(FORMATS[fmt][0](x)[1], FORMATS[fmt][1](x)[1], f"{fmt} scales")
