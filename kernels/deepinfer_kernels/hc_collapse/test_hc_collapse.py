"""Collapse of the streams against the golden vectors and row by row."""

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_collapse.reference import TOLERANCE_BF16_ULPS, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    require_golden,
)


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 4, 97, dtype, device, torch.Generator().manual_seed(18))


@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_agree_with_the_golden_vectors(name: str, device: str) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{name}.safetensors"), device=device)
    got = hc_collapse(golden["mhc.full.x"], golden["mhc.full.pre"])
    assert_within_ulps_bf16(got, golden["mhc.full.collapse"], TOLERANCE_BF16_ULPS, "collapse")


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
def test_rows_are_weighted_sums_rounded_once(num_rows: int, device: str) -> None:
    streams, pre = _inputs(num_rows, torch.bfloat16, device)
    want = torch.einsum("tsd,ts->td", streams.double(), pre.double()).float()
    got = hc_collapse(streams.float(), pre)
    assert_close(got, want, TOLERANCE_FP32, "collapse")
    assert_bitwise_equal(hc_collapse(streams, pre), got.bfloat16(), "bf16")


def test_identity_weights_return_the_first_stream(device: str) -> None:
    streams, _ = _inputs(17, torch.bfloat16, device)
    pre = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device).expand(17, 4)
    assert_bitwise_equal(hc_collapse(streams, pre), streams[:, 0].contiguous(), "first stream")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    streams, pre = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: hc_collapse(streams[rows], pre[rows]), 40, "hc_collapse")


def test_strided_input_gives_the_same_bits(device: str) -> None:
    streams, pre = _inputs(20, torch.float32, device)
    got = hc_collapse(streams.transpose(0, 1).contiguous().transpose(0, 1), pre.t().contiguous().t())
    assert_bitwise_equal(got, hc_collapse(streams, pre), "streams first")


def test_nan_in_one_row_stays_there(device: str) -> None:
    streams, pre = _inputs(20, torch.float32, device)
    want = hc_collapse(streams, pre)
    streams[3] = float("nan")
    got = hc_collapse(streams, pre)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    streams, pre = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^hc_collapse: pre is \[2, 3\], expected \[2, 4\]; one weight per stream"):
        hc_collapse(streams, pre[:, :3])
    with pytest.raises(ShapeError, match=r"^hc_collapse: streams is \[2, 0, 97\], expected at least one stream;"):
        hc_collapse(streams[:, :0], pre[:, :0])
    with pytest.raises(UnsupportedError, match=r"^hc_collapse: pre is torch.bfloat16, expected torch.float32;"):
        hc_collapse(streams, pre.bfloat16())
