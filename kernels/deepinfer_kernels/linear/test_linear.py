"""Linear layers against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels import dense_cache
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.linear import dequantize_blocks, grouped_linear, linear, mxfp8_linear
from deepinfer_kernels.linear.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.mxfp4_quant import mxfp4_dequant
from deepinfer_kernels.mxfp8_quant import mxfp8_fake_quant
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)

_FP32 = torch.float32
# The golden outputs reach 90, where one fp32 ulp is 8e-6.
_GOLDEN_ATOL = 4e-5


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    dense_cache.clear()


def _inputs(num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 80, 96, _FP32, device, torch.Generator().manual_seed(14))


@pytest.mark.parametrize("name", ["a", "b"])
def test_mxfp8_weights_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    x, weight, scale = golden["lin.x"], golden["lin.w8"], golden["lin.s8"].view(torch.uint8)
    got = mxfp8_linear(x, weight, scale, out_dtype=torch.bfloat16, quantize_input=True)
    assert_within_ulps_bf16(got, golden["lin.y8"], TOLERANCE_BF16_ULPS, "y8")
    got = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
    assert_close(got, golden["lin.y8_fp32"], _GOLDEN_ATOL, "y8 in fp32")


@pytest.mark.parametrize("name", ["a", "b"])
def test_mxfp4_weights_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    weight = mxfp4_dequant(golden["lin.w4"].view(torch.uint8), golden["lin.s4"].view(torch.uint8), torch.bfloat16)
    x = mxfp8_fake_quant(golden["lin.x"])
    got = linear(x, weight, out_dtype=torch.bfloat16)
    assert_within_ulps_bf16(got, golden["lin.y4"], TOLERANCE_BF16_ULPS, "y4")
    assert_close(linear(x, weight, out_dtype=_FP32), golden["lin.y4_fp32"], _GOLDEN_ATOL, "y4 in fp32")


def test_blocks_of_32_by_32_share_a_scale(device: str) -> None:
    _, weight, scale = _inputs(0, device)
    got = dequantize_blocks(weight, scale, _FP32)
    for row, column in [(0, 0), (31, 31), (32, 0), (0, 32), (63, 95), (64, 64), (79, 95)]:
        factor = 2.0 ** (int(scale[row // 32, column // 32]) - 127)
        assert float(got[row, column]) == float(weight[row, column].float()) * factor
    assert_bitwise_equal(dequantize_blocks(weight, scale, torch.bfloat16).float(), got, "bf16 is exact")


@pytest.mark.parametrize("num_rows", [*EDGE_SIZES, 40])
def test_products_agree_with_double_precision(num_rows: int, device: str) -> None:
    x, weight, scale = _inputs(num_rows, device)
    dense = dequantize_blocks(weight, scale, torch.bfloat16)
    want = (x.double() @ dense.double().t()).float()
    assert_close(linear(x, dense, out_dtype=_FP32), want, TOLERANCE_FP32, "bf16 weight")
    assert_close(linear(x, dense.float(), out_dtype=_FP32), want, TOLERANCE_FP32, "fp32 weight")
    got = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=False)
    assert_close(got, want, TOLERANCE_FP32, "mxfp8 weight")
    want = (mxfp8_fake_quant(x).double() @ dense.double().t()).float()
    got = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
    assert_close(got, want, TOLERANCE_FP32, "mxfp8 weight and input")


@pytest.mark.parametrize("num_rows", [*EDGE_SIZES, 40])
def test_groups_use_their_own_block_of_the_weight(num_rows: int, device: str) -> None:
    x, weight, scale = make_inputs(num_rows * 2, 80, 96, _FP32, device, torch.Generator().manual_seed(15))
    grouped = x.view(num_rows, 2, 96)
    dense = dequantize_blocks(weight, scale, _FP32)
    got = grouped_linear(grouped, weight, scale, out_dtype=_FP32)
    assert got.shape == (num_rows, 2, 40)
    for group in range(2):
        want = linear(grouped[:, group], dense[group * 40 : group * 40 + 40].contiguous(), out_dtype=_FP32)
        assert_bitwise_equal(got[:, group], want, f"group {group}")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    x, weight, scale = _inputs(50, device)
    dense = dequantize_blocks(weight, scale, torch.bfloat16)
    assert_rows_keep_their_bits(lambda rows: linear(x[rows], dense, out_dtype=_FP32), 50, "linear")
    assert_rows_keep_their_bits(
        lambda rows: mxfp8_linear(x[rows], weight, scale, out_dtype=_FP32, quantize_input=True), 50, "mxfp8_linear"
    )
    pairs = torch.stack([x, x.flip(0)], dim=1)
    assert_rows_keep_their_bits(
        lambda rows: grouped_linear(pairs[rows], weight, scale, out_dtype=_FP32), 50, "grouped_linear"
    )


def test_strided_input_gives_the_same_bits(device: str) -> None:
    x, weight, scale = _inputs(40, device)
    turned = x.t().contiguous().t()
    for quantize_input in (False, True):
        want = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=quantize_input)
        got = mxfp8_linear(turned, weight, scale, out_dtype=_FP32, quantize_input=quantize_input)
        assert_bitwise_equal(got, want, "column-major")


def test_nan_in_one_row_stays_there(device: str) -> None:
    x, weight, scale = _inputs(20, device)
    want = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
    x[3, 40] = float("nan")
    got = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_values_are_the_same_with_and_without_the_cache() -> None:
    x, weight, scale = _inputs(20, "cpu")
    dense_cache.set_budget_bytes(0)
    without = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
    assert dense_cache.used_bytes() == 0
    dense_cache.set_budget_bytes(1 << 30)
    for call in ("first", "second"):
        got = mxfp8_linear(x, weight, scale, out_dtype=_FP32, quantize_input=True)
        assert_bitwise_equal(got, without, f"{call} call with the cache")
    assert dense_cache.used_bytes() == 80 * 96 * 4
    doubled = mxfp8_linear(x, weight, scale + 1, out_dtype=_FP32, quantize_input=True)
    assert_bitwise_equal(doubled, without * 2, "another scale")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x, weight, scale = _inputs(4, device)
    with pytest.raises(ShapeError, match=r"^linear: weight is \[4, 64\], expected \[4, 96\]; its columns are those"):
        linear(x, x[:, :64], out_dtype=_FP32)
    with pytest.raises(UnsupportedError, match=r"^linear: out_dtype is torch.float16, expected"):
        linear(x, x, out_dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"^mxfp8_linear: scale is \[2, 3\], expected \[3, 3\]; the weight has one"):
        mxfp8_linear(x, weight, scale[:2], out_dtype=_FP32, quantize_input=True)
    with pytest.raises(UnsupportedError, match=r"^mxfp8_linear: weight is torch.float32, expected torch.float8_e4m3fn"):
        mxfp8_linear(x, weight.float(), scale, out_dtype=_FP32, quantize_input=True)
    with pytest.raises(ShapeError, match=r"^grouped_linear: weight is \[80, 96\], expected \[a multiple of 3, 96\];"):
        grouped_linear(torch.zeros(2, 3, 96), weight, scale, out_dtype=_FP32)
    with pytest.raises(ShapeError, match=r"^dequantize_blocks: weight is \[80, 90\], expected a last axis"):
        dequantize_blocks(weight[:, :90], scale, _FP32)
