"""MXFP8 quantisation against the golden vectors, exact, and per block."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.mxfp8_quant import mxfp8_dequant, mxfp8_fake_quant, mxfp8_quant
from deepinfer_kernels.mxfp8_quant.reference import make_inputs
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
    codes, scale = mxfp8_quant(x)
    assert_bitwise_equal(codes.view(torch.uint8), golden["mxfp8.codes"], "codes")
    assert_bitwise_equal(scale, golden["mxfp8.scales"], "scales")
    assert_bitwise_equal(mxfp8_dequant(codes, scale, torch.bfloat16), golden["mxfp8.value"], "dequantised")
    assert_bitwise_equal(mxfp8_fake_quant(x), golden["mxfp8.value"], "fake quantised")
    assert_bitwise_equal(mxfp8_fake_quant(x.float()), golden["mxfp8.value"].float(), "fake quantised in fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [*EDGE_SIZES, 40])
def test_fake_quantisation_is_quantisation_and_back(num_rows: int, dtype: torch.dtype, device: str) -> None:
    x = _inputs(num_rows, dtype, device)
    codes, scale = mxfp8_quant(x)
    assert (codes.shape, scale.shape) == ((num_rows, 96), (num_rows, 96 // 32))
    assert_bitwise_equal(mxfp8_dequant(codes, scale, dtype), mxfp8_fake_quant(x), "fake quantised")
    assert_bitwise_equal(mxfp8_fake_quant(mxfp8_fake_quant(x)).abs(), mxfp8_fake_quant(x).abs(), "twice")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    x = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: mxfp8_fake_quant(x[rows]), 40, "mxfp8_fake_quant")
    assert_rows_keep_their_bits(lambda rows: mxfp8_quant(x[rows])[0].view(torch.uint8), 40, "codes")
    assert_rows_keep_their_bits(lambda rows: mxfp8_quant(x[rows])[1], 40, "scales")


def test_strided_input_and_more_axes_give_the_same_bits(device: str) -> None:
    x = _inputs(40, torch.float32, device)
    want = mxfp8_fake_quant(x)
    assert_bitwise_equal(mxfp8_fake_quant(x.t().contiguous().t()), want, "column-major")
    assert_bitwise_equal(mxfp8_fake_quant(x.view(4, 10, 96)), want.view(4, 10, 96), "three axes")
    codes, scale = mxfp8_quant(x.t().contiguous().t())
    assert_bitwise_equal(mxfp8_dequant(codes, scale, torch.float32), want, "codes of column-major")


def test_nan_stays_in_its_block(device: str) -> None:
    x = _inputs(20, torch.float32, device)
    want = mxfp8_fake_quant(x)
    x[3, 40] = float("nan")
    got = mxfp8_fake_quant(x)
    block = slice(40 // 32 * 32, 40 // 32 * 32 + 32)
    assert bool(got[3, block].isnan().all())
    assert bool(mxfp8_dequant(*mxfp8_quant(x), torch.float32)[3, block].isnan().all())
    got[3, block] = want[3, block]
    assert_bitwise_equal(got, want, "other blocks")


@pytest.mark.parametrize(
    ("amax", "byte"), [(0.0, 105), (1e-4, 105), (1.0, 119), (3.5, 120), (448.0, 127), (449.0, 128)]
)
def test_scale_is_the_exponent_ceiling_of_the_product(amax: float, byte: int, device: str) -> None:
    x = torch.zeros(1, 32, device=device)
    x[0, 7] = -amax
    assert mxfp8_quant(x)[1].tolist() == [[byte]]


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^mxfp8_quant: x is \[2, 90\], expected a last axis .* multiple of 32;"):
        mxfp8_quant(x[:, :90])
    with pytest.raises(UnsupportedError, match=r"^mxfp8_fake_quant: x is torch.float64, expected torch.bfloat16 or"):
        mxfp8_fake_quant(x.double())
    codes, scale = mxfp8_quant(x)
    with pytest.raises(ShapeError, match=r"^mxfp8_dequant: scale is \[2, 1\], expected \[2, 3\];"):
        mxfp8_dequant(codes, scale[:, :1], torch.float32)
    with pytest.raises(UnsupportedError, match=r"^mxfp8_dequant: dtype is torch.float16, expected"):
        mxfp8_dequant(codes, scale, torch.float16)
    with pytest.raises(UnsupportedError, match=r"^mxfp8_dequant: codes is torch.int8, expected"):
        mxfp8_dequant(codes.view(torch.int8), scale, torch.float32)
