"""MXFP4 quantisation against the golden vectors, exact, and per block."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant, mxfp4_fake_quant, mxfp4_quant
from deepinfer_kernels.mxfp4_quant.reference import make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_rows_keep_their_bits,
    require_golden,
)


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return make_inputs(num_rows, 96, dtype, device, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["a", "b"])
def test_codes_scales_and_values_equal_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    x = golden["quant.x"]
    codes, scale = mxfp4_quant(x)
    assert_bitwise_equal(codes.view(torch.uint8), golden["mxfp4.packed"], "codes")
    assert_bitwise_equal(scale, golden["mxfp4.scales"], "scales")
    assert_bitwise_equal(mxfp4_dequant(codes, scale, torch.bfloat16), golden["mxfp4.value"], "dequantised")
    assert_bitwise_equal(mxfp4_fake_quant(x), golden["mxfp4.value"], "fake quantised")
    assert_bitwise_equal(mxfp4_fake_quant(x.float()), golden["mxfp4.value"].float(), "fake quantised in fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [*EDGE_SIZES, 40])
def test_fake_quantisation_is_quantisation_and_back(num_rows: int, dtype: torch.dtype, device: str) -> None:
    x = _inputs(num_rows, dtype, device)
    codes, scale = mxfp4_quant(x)
    assert (codes.shape, scale.shape) == ((num_rows, 48), (num_rows, 96 // 32))
    assert_bitwise_equal(mxfp4_dequant(codes, scale, dtype), mxfp4_fake_quant(x), "fake quantised")
    assert_bitwise_equal(mxfp4_fake_quant(mxfp4_fake_quant(x)).abs(), mxfp4_fake_quant(x).abs(), "twice")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    x = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: mxfp4_fake_quant(x[rows]), 40, "mxfp4_fake_quant")
    assert_rows_keep_their_bits(lambda rows: mxfp4_quant(x[rows])[0].view(torch.uint8), 40, "codes")
    assert_rows_keep_their_bits(lambda rows: mxfp4_quant(x[rows])[1], 40, "scales")


def test_strided_input_and_more_axes_give_the_same_bits(device: str) -> None:
    x = _inputs(40, torch.float32, device)
    want = mxfp4_fake_quant(x)
    assert_bitwise_equal(mxfp4_fake_quant(x.t().contiguous().t()), want, "column-major")
    assert_bitwise_equal(mxfp4_fake_quant(x.view(4, 10, 96)), want.view(4, 10, 96), "three axes")
    codes, scale = mxfp4_quant(x.t().contiguous().t())
    assert_bitwise_equal(mxfp4_dequant(codes, scale, torch.float32), want, "codes of column-major")


def test_nan_stays_in_its_block(device: str) -> None:
    x = _inputs(20, torch.float32, device)
    want = mxfp4_fake_quant(x)
    x[3, 40] = float("nan")
    got = mxfp4_fake_quant(x)
    block = slice(40 // 32 * 32, 40 // 32 * 32 + 32)
    assert bool(got[3, block].isnan().all())
    assert bool(mxfp4_dequant(*mxfp4_quant(x), torch.float32)[3, block].isnan().all())
    got[3, block] = want[3, block]
    assert_bitwise_equal(got, want, "other blocks")


@pytest.mark.parametrize(("amax", "byte"), [(0.0, 1), (1.0, 125), (6.0, 127), (6.1, 128)])
def test_scale_is_the_exponent_ceiling_of_the_product(amax: float, byte: int, device: str) -> None:
    x = torch.zeros(1, 32, device=device)
    x[0, 7] = -amax
    assert mxfp4_quant(x)[1].tolist() == [[byte]]


def test_e2m1_ties_go_to_the_even_code(device: str) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=device).repeat(4)
    signs = torch.tensor([1.0, -1.0], device=device).repeat_interleave(8).repeat(2)
    packed, _ = mxfp4_quant((ties * signs).unsqueeze(0))
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten().tolist()
    assert codes[:16] == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^mxfp4_quant: x is \[2, 90\], expected a last axis .* multiple of 32;"):
        mxfp4_quant(x[:, :90])
    with pytest.raises(UnsupportedError, match=r"^mxfp4_fake_quant: x is torch.float64, expected torch.bfloat16 or"):
        mxfp4_fake_quant(x.double())
    codes, scale = mxfp4_quant(x)
    with pytest.raises(ShapeError, match=r"^mxfp4_dequant: scale is \[2, 1\], expected \[2, 3\];"):
        mxfp4_dequant(codes, scale[:, :1], torch.float32)
    with pytest.raises(UnsupportedError, match=r"^mxfp4_dequant: dtype is torch.float16, expected"):
        mxfp4_dequant(codes, scale, torch.float16)
    with pytest.raises(UnsupportedError, match=r"^mxfp4_dequant: packed is torch.int8, expected"):
        mxfp4_dequant(codes.view(torch.int8), scale, torch.float32)
