"""Clamped SwiGLU against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.swiglu import swiglu
from deepinfer_kernels.swiglu.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)

# The golden file does not hold the routing weight of its "_w" rows; every element of both files fits this one only.
_GOLDEN_ROW_WEIGHT = 0.37


def _inputs(num_rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, width, torch.float32, device, torch.Generator().manual_seed(20))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("limit", ["0", "0.5", "10"])
def test_rows_agree_with_the_golden_vectors(limit: str, name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    gate, up = golden["swiglu.gate"], golden["swiglu.up"]
    got = swiglu(gate, up, float(limit))
    assert_within_ulps_bf16(got, golden[f"swiglu.h_limit{limit}"], TOLERANCE_BF16_ULPS, "without weight")
    got = swiglu(gate, up, float(limit), torch.full((gate.shape[0],), _GOLDEN_ROW_WEIGHT, device=device))
    assert_within_ulps_bf16(got, golden[f"swiglu.h_limit{limit}_w"], TOLERANCE_BF16_ULPS, "with weight")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_gate_is_clamped_from_above_only_and_the_weight_comes_before_rounding(num_rows: int, device: str) -> None:
    gate, up, weight = _inputs(num_rows, 65, device)
    want = torch.nn.functional.silu(gate.double().clamp_max(10)) * up.double().clamp(-10, 10)
    got = swiglu(gate, up, 10.0, weight)
    assert_close(got, (want * weight.double().unsqueeze(-1)).float(), 2 * TOLERANCE_FP32, "with weight")
    gate, up = gate.bfloat16(), up.bfloat16()
    got = swiglu(gate.float(), up.float(), 10.0, weight).bfloat16()
    assert_bitwise_equal(swiglu(gate, up, 10.0, weight), got, "rounded once")


def test_limit_zero_turns_the_clamps_off(device: str) -> None:
    gate, up = torch.full((1, 1), 100.0, device=device), torch.full((1, 1), -50.0, device=device)
    assert float(swiglu(gate, up, 0.0)) == -5000.0
    assert float(swiglu(gate, up, 10.0)) == pytest.approx(-100.0, rel=1e-4)
    assert float(swiglu(-gate, up, 10.0)) == 0.0


@pytest.mark.parametrize("width", [3, 64, 65])
def test_every_row_keeps_its_bits_in_any_batch(width: int, device: str) -> None:
    gate, up, weight = _inputs(61, width, device)
    assert_rows_keep_their_bits(lambda rows: swiglu(gate[rows], up[rows], 10.0, weight[rows]), 61, f"width {width}")


def test_strided_input_gives_the_same_bits(device: str) -> None:
    gate, up, weight = _inputs(20, 64, device)
    both = torch.cat([gate, up], dim=1)
    got = swiglu(both[:, :64], both[:, 64:], 10.0, weight)
    assert_bitwise_equal(got, swiglu(gate, up, 10.0, weight), "halves of one tensor")


def test_nan_in_one_row_stays_there(device: str) -> None:
    gate, up, weight = _inputs(20, 64, device)
    want = swiglu(gate, up, 10.0, weight)
    gate[3] = float("nan")
    got = swiglu(gate, up, 10.0, weight)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    gate, up, weight = _inputs(2, 64, device)
    with pytest.raises(ShapeError, match=r"^swiglu: up is \[2, 63\], expected \[2, 64\]; up has the shape of gate"):
        swiglu(gate, up[:, :63], 10.0)
    with pytest.raises(ShapeError, match=r"^swiglu: row_weight is \[1\], expected \[2\]; one weight per row of gate"):
        swiglu(gate, up, 10.0, weight[:1])
    with pytest.raises(UnsupportedError, match=r"^swiglu: up is torch.bfloat16, expected torch.float32;"):
        swiglu(gate, up.bfloat16(), 10.0)
    with pytest.raises(UnsupportedError, match=r"^swiglu: limit is -1.0, expected >= 0;"):
        swiglu(gate, up, -1.0)
