"""Rotary embedding against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.rope import YarnScaling, cos_sin, inverse_frequencies, rope
from deepinfer_kernels.rope.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)

_YARN = YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
_SMALL_YARN = YarnScaling(factor=16, beta_fast=4, beta_slow=1, original_max_position_embeddings=256)
_TABLES: dict[str, tuple[int, float, YarnScaling | None]] = {
    "plain": (64, 10000.0, None),
    "yarn": (64, 160000.0, _YARN),
    "small_plain": (16, 100.0, None),
    "small_yarn": (16, 1000.0, _SMALL_YARN),
}


def _inputs(num_rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, positions = make_inputs(num_rows, 3, 96, torch.float32, device, torch.Generator().manual_seed(12))
    cos, sin = cos_sin(positions, inverse_frequencies(64, 160000.0, _YARN).to(device))
    return x, cos, sin


@pytest.mark.parametrize("table", sorted(_TABLES))
@pytest.mark.parametrize("name", ["a", "b"])
def test_tables_and_vectors_agree_with_the_golden_vectors(name: str, table: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    inv_freq = inverse_frequencies(*_TABLES[table]).to(device)
    cos, sin = cos_sin(golden[f"rope.{table}.pos"], inv_freq)
    assert_close(cos, golden[f"rope.{table}.cos"], TOLERANCE_FP32, "cos")
    assert_close(sin, golden[f"rope.{table}.sin"], TOLERANCE_FP32, "sin")
    rotated = rope(golden[f"rope.{table}.x"], cos, sin)
    assert_within_ulps_bf16(rotated, golden[f"rope.{table}.y"], TOLERANCE_BF16_ULPS, "rotated")
    back = rope(golden[f"rope.{table}.y"], cos, sin, inverse=True)
    assert_within_ulps_bf16(back, golden[f"rope.{table}.back"], TOLERANCE_BF16_ULPS, "rotated back")


def test_frequencies_are_those_of_the_specification() -> None:
    yarn = inverse_frequencies(64, 160000.0, _YARN)
    plain = inverse_frequencies(64, 10000.0, None)
    assert yarn.device.type == "cpu"
    for k, value in {0: 1.0, 1: 0.687656045, 15: 3.63553851e-3, 16: 2.26562493e-3, 20: 2.96977785e-4}.items():
        assert float(yarn[k]) == pytest.approx(value, rel=1e-8)
    assert float(yarn[25]) == pytest.approx(5.37231244e-6, rel=1e-8)
    assert float(yarn[31]) == pytest.approx(5.6805294e-7, rel=1e-7)
    assert float(plain[1]) == pytest.approx(0.749894202, rel=1e-8)
    assert float(plain[31]) == pytest.approx(1.3335215e-4, rel=1e-7)


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_rotation_is_a_complex_product_and_leaves_the_head_alone(num_rows: int, device: str) -> None:
    x, cos, sin = _inputs(num_rows, device)
    before = x.clone()
    got = rope(x, cos, sin)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    want = torch.view_as_real(torch.view_as_complex(x[..., 32:].double().reshape(num_rows, 3, 32, 2)) * turn)
    assert_close(got[..., 32:], want.flatten(-2).float(), TOLERANCE_FP32, "rotated dimensions")
    assert_bitwise_equal(got[..., :32], x[..., :32], "other dimensions")
    assert_bitwise_equal(x, before, "input")
    assert_close(rope(got, cos, sin, inverse=True), x, TOLERANCE_FP32, "and back")


@pytest.mark.parametrize("rotary_dim", [16, 34, 64])
def test_every_row_keeps_its_bits_in_any_batch(rotary_dim: int, device: str) -> None:
    x, positions = make_inputs(40, 3, 96, torch.float32, device, torch.Generator().manual_seed(13))
    inv_freq = inverse_frequencies(rotary_dim, 10000.0, None).to(device)
    assert_rows_keep_their_bits(lambda rows: cos_sin(positions[rows], inv_freq)[0], 40, "cos")
    assert_rows_keep_their_bits(lambda rows: cos_sin(positions[rows], inv_freq)[1], 40, "sin")
    cos, sin = cos_sin(positions, inv_freq)
    assert_rows_keep_their_bits(lambda rows: rope(x[rows], cos[rows], sin[rows]), 40, "rope")
    assert_rows_keep_their_bits(lambda rows: rope(x[rows], cos[rows], sin[rows], inverse=True), 40, "inverse")


def test_strided_input_and_other_axes_give_the_same_bits(device: str) -> None:
    x, cos, sin = _inputs(17, device)
    want = rope(x, cos, sin)
    assert_bitwise_equal(rope(x.transpose(0, 1).contiguous().transpose(0, 1), cos, sin), want, "heads first")
    assert rope(x.transpose(0, 1).contiguous().transpose(0, 1), cos, sin).is_contiguous()
    assert_bitwise_equal(rope(x[:, 1], cos, sin), want[:, 1], "no head axis")


def test_nan_in_one_row_stays_there(device: str) -> None:
    x, cos, sin = _inputs(17, device)
    want = rope(x, cos, sin)
    x[4] = float("nan")
    got = rope(x, cos, sin)
    assert bool(got[4].isnan().all())
    got[4] = want[4]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x, cos, sin = _inputs(4, device)
    with pytest.raises(ShapeError, match=r"^rope: x is \[3, 3, 96\], expected \[4, ..., at least 64\]; the tables"):
        rope(x[:3], cos, sin)
    with pytest.raises(ShapeError, match=r"^rope: sin is \[3, 32\], expected \[4, 32\]; sin has the shape of cos"):
        rope(x, cos, sin[:3])
    with pytest.raises(UnsupportedError, match=r"^rope: x is torch.float64, expected"):
        rope(x.double(), cos, sin)
    with pytest.raises(UnsupportedError, match=r"^cos_sin: positions is torch.int32, expected torch.int64;"):
        cos_sin(torch.zeros(3, dtype=torch.int32), torch.ones(4))
    with pytest.raises(UnsupportedError, match=r"^inverse_frequencies: rotary_dim is 7, expected a positive even"):
        inverse_frequencies(7, 100.0, None)
    with pytest.raises(UnsupportedError, match=r"^inverse_frequencies: theta is 1.0, expected > 1;"):
        inverse_frequencies(8, 1.0, None)
    with pytest.raises(UnsupportedError, match=r"^YarnScaling: factor is 0, expected > 0;"):
        YarnScaling(factor=0, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
