"""Mix logits against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_mix.reference import TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    require_golden,
)


def _inputs(num_rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 4, width, torch.float32, device, torch.Generator().manual_seed(16))


@pytest.mark.parametrize("name", ["a", "b"])
def test_logits_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    got = hc_mix(golden["mhc.full.x"], golden["mhc.full.fn"], 1e-20)
    assert_close(got, golden["mhc.full.mix"], TOLERANCE_FP32, "mix")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_one_statistic_serves_all_streams(num_rows: int, device: str) -> None:
    streams, fn = _inputs(num_rows, 96, device)
    flat = streams.double().flatten(1)
    want = flat @ fn.double().t() / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    assert_close(hc_mix(streams, fn, 1e-20), want.float(), TOLERANCE_FP32, "mix")


@pytest.mark.parametrize("width", [33, 128, 5120])
def test_every_row_keeps_its_bits_in_any_batch(width: int, device: str) -> None:
    streams, fn = _inputs(40, width, device)
    assert_rows_keep_their_bits(lambda rows: hc_mix(streams[rows], fn, 1e-20), 40, f"width {width}")


def test_strided_input_gives_the_same_bits(device: str) -> None:
    streams, fn = _inputs(20, 96, device)
    turned = streams.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise_equal(hc_mix(turned, fn, 1e-20), hc_mix(streams, fn, 1e-20), "streams first")


def test_nan_in_one_row_stays_there(device: str) -> None:
    streams, fn = _inputs(20, 96, device)
    want = hc_mix(streams, fn, 1e-20)
    streams[3, 1, 5] = float("nan")
    got = hc_mix(streams, fn, 1e-20)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    streams, fn = _inputs(2, 96, device)
    with pytest.raises(ShapeError, match=r"^hc_mix: fn is \[24, 380\], expected \[24, 384\]; it has"):
        hc_mix(streams, fn[:, :380], 1e-20)
    with pytest.raises(ShapeError, match=r"^hc_mix: streams is \[2, 384\], expected 3 axes; pass \[T, S, d\]"):
        hc_mix(streams.flatten(1), fn, 1e-20)
    with pytest.raises(UnsupportedError, match=r"^hc_mix: fn is torch.bfloat16, expected torch.float32;"):
        hc_mix(streams, fn.bfloat16(), 1e-20)
