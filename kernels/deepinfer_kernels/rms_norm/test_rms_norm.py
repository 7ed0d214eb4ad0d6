"""RMSNorm against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.rms_norm.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)


def _inputs(num_rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, width, torch.float32, device, torch.Generator().manual_seed(11))


@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    got = rms_norm(golden["rms.x"], golden["rms.w"], 1e-20)
    assert_within_ulps_bf16(got, golden["rms.y"], TOLERANCE_BF16_ULPS, "rms")
    exact = rms_norm(golden["rms.x"].float(), golden["rms.w"], 1e-20)
    assert_bitwise_equal(exact.bfloat16(), got, "fp32 rounded once")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_rows_agree_with_double_precision(num_rows: int, device: str) -> None:
    x, weight = _inputs(num_rows, 4097, device)
    wide = x.double()
    want = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    assert_close(rms_norm(x, weight, 1e-20), want.float(), TOLERANCE_FP32, "rms")


@pytest.mark.parametrize("width", [5, 128, 512, 4097, 5120])
def test_every_row_keeps_its_bits_in_any_batch(width: int, device: str) -> None:
    x, weight = _inputs(64, width, device)
    assert_rows_keep_their_bits(lambda rows: rms_norm(x[rows], weight, 1e-20), 64, f"width {width}")


def test_strided_input_and_more_axes_give_the_same_bits(device: str) -> None:
    x, weight = _inputs(40, 128, device)
    want = rms_norm(x, weight, 1e-20)
    assert_bitwise_equal(rms_norm(x.t().contiguous().t(), weight, 1e-20), want, "column-major")
    assert_bitwise_equal(rms_norm(torch.cat([x, x], dim=1)[:, :128], weight, 1e-20), want, "wide rows")
    assert_bitwise_equal(rms_norm(x.view(4, 10, 128), weight, 1e-20), want.view(4, 10, 128), "three axes")


def test_nan_in_one_row_stays_there(device: str) -> None:
    x, weight = _inputs(20, 128, device)
    want = rms_norm(x, weight, 1e-20)
    x[3, 5] = float("nan")
    got = rms_norm(x, weight, 1e-20)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_zero_row_stays_zero_and_eps_acts_at_1e_10(device: str) -> None:
    x = torch.tensor([[0.0] * 8, [1e-10] * 8], device=device)
    got = rms_norm(x, torch.ones(8, device=device), 1e-20)
    assert got[0].tolist() == [0.0] * 8
    assert_close(got[1], torch.full((8,), 0.5**0.5), 1e-5, "tiny row")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x, weight = _inputs(2, 8, device)
    with pytest.raises(ShapeError, match=r"^rms_norm: weight is \[7\], expected \[8\]; one value per element"):
        rms_norm(x, weight[:7], 1e-20)
    with pytest.raises(UnsupportedError, match=r"^rms_norm: x is torch.float16, expected torch.bfloat16 or"):
        rms_norm(x.half(), weight, 1e-20)
    with pytest.raises(UnsupportedError, match=r"^rms_norm: eps is 0, expected > 0;"):
        rms_norm(x, weight, 0)
