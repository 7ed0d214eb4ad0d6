"""A sublayer's input against the operations it joins, and row by row."""

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_norm import hc_norm
from deepinfer_kernels.hc_norm.reference import make_inputs
from deepinfer_kernels.linear import mxfp8_linear, mxfp8_prepared_linear
from deepinfer_kernels.linear.reference import make_inputs as make_linear_inputs
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

EPS = 1e-20
WIDTH = 160


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_rows, 4, WIDTH, dtype, device, torch.Generator().manual_seed(51))


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [False, True])
def test_it_gives_the_bits_of_the_operations_it_joins(
    num_rows: int, dtype: torch.dtype, quantize: bool, device: str
) -> None:
    streams, pre, weight = _inputs(num_rows, dtype, device)
    given = hc_norm(streams, pre, weight, EPS, quantize=quantize, for_experts=True)
    want = rms_norm(hc_collapse(streams, pre), weight, EPS)
    assert_bitwise_equal(given.x, want, "x")
    _, codes, scale = make_linear_inputs(0, 96, WIDTH, dtype, device, torch.Generator().manual_seed(52))
    product = mxfp8_linear(want, codes, scale, out_dtype=torch.float32, quantize_input=quantize)
    got = mxfp8_prepared_linear(given.rows, codes, scale, out_dtype=torch.float32)
    assert_bitwise_equal(got, product, "product of the rows")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    streams, pre, weight = _inputs(40, torch.float32, device)

    def run(rows: slice) -> torch.Tensor:
        given = hc_norm(streams[rows], pre[rows], weight, EPS, quantize=True, for_experts=True)
        return torch.cat([part.float() for part in given], dim=1)

    assert_rows_keep_their_bits(run, 40, "hc_norm")


def test_strided_streams_give_the_same_bits(device: str) -> None:
    streams, pre, weight = _inputs(20, torch.bfloat16, device)
    turned = streams.transpose(0, 1).contiguous().transpose(0, 1)
    want = hc_norm(streams, pre, weight, EPS, quantize=True, for_experts=True)
    got = hc_norm(turned, pre.t().contiguous().t(), weight, EPS, quantize=True, for_experts=True)
    for name, part, wanted in zip(want._fields, got, want, strict=True):
        assert_bitwise_equal(part, wanted, name)


def test_nan_in_one_row_stays_there(device: str) -> None:
    streams, pre, weight = _inputs(20, torch.float32, device)
    want = hc_norm(streams, pre, weight, EPS, quantize=True, for_experts=True)
    streams[3, 1, 7] = float("nan")
    got = hc_norm(streams, pre, weight, EPS, quantize=True, for_experts=True)
    for name, part, wanted in zip(want._fields, got, want, strict=True):
        assert int(part[3].isnan().sum()) >= WIDTH, name
        others = torch.where(torch.arange(20, device=device)[:, None] == 3, wanted, part)
        assert_bitwise_equal(others, wanted, f"{name}, other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    streams, pre, weight = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^hc_norm: pre is \[2, 3\], expected \[2, 4\]; one weight per stream"):
        hc_norm(streams, pre[:, :3], weight, EPS, quantize=True, for_experts=False)
    with pytest.raises(ShapeError, match=r"^hc_norm: streams is \[2, 4, 150\], expected a last axis that is"):
        hc_norm(streams[..., :150], pre, weight[:150], EPS, quantize=True, for_experts=False)
    with pytest.raises(UnsupportedError, match=r"^hc_norm: eps is 0.0, expected > 0;"):
        hc_norm(streams, pre, weight, 0.0, quantize=True, for_experts=False)
