"""The end of attention against the operations it joins, and row by row."""

import pytest
import torch

from deepinfer_kernels.attention_output import attention_output
from deepinfer_kernels.attention_output.reference import make_inputs
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.linear import grouped_linear, mxfp8_linear
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

GROUPS, LOW, WIDTH = 2, 48, 128
Inputs = tuple[torch.Tensor, ...]


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> Inputs:
    return make_inputs(num_rows, GROUPS, LOW, WIDTH, dtype, device, torch.Generator().manual_seed(55))


def _run(inputs: Inputs, quantize: bool, rows: slice = slice(None)) -> torch.Tensor:
    out, wo_a, a_scale, wo_b, b_scale, *mix = inputs
    streams, post, comb = (part[rows] for part in mix)
    return attention_output(out[rows], (wo_a, a_scale), (wo_b, b_scale), streams, post, comb, quantize=quantize)


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [False, True])
def test_it_gives_the_bits_of_the_operations_it_joins(
    num_rows: int, dtype: torch.dtype, quantize: bool, device: str
) -> None:
    inputs = _inputs(num_rows, dtype, device)
    out, wo_a, a_scale, wo_b, b_scale, *mix = inputs
    low = grouped_linear(out, wo_a, a_scale, out_dtype=dtype).flatten(1)
    y = mxfp8_linear(low, wo_b, b_scale, out_dtype=dtype, quantize_input=quantize)
    assert_bitwise_equal(_run(inputs, quantize), hc_post(y, *mix), "streams")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    inputs = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: _run(inputs, False, rows), 40, "attention_output")


def test_nan_in_one_row_stays_there(device: str) -> None:
    inputs = _inputs(20, torch.float32, device)
    want = _run(inputs, True)
    inputs[0][3, 1, 5] = float("nan")
    got = _run(inputs, True)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    out, wo_a, a_scale, wo_b, b_scale, *mix = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^attention_output: wo_a is \[96, 64\], expected \[a multiple of 4, 32\];"):
        attention_output(out.view(2, 4, 32), (wo_a, a_scale), (wo_b, b_scale), *mix, quantize=True)
    with pytest.raises(ShapeError, match=r"^attention_output: wo_b is \[96, 96\], expected \[128, 96\]; it leads from"):
        attention_output(out, (wo_a, a_scale), (wo_b[:96], b_scale[:3]), *mix, quantize=True)
    with pytest.raises(ShapeError, match=r"^attention_output: post is \[2, 3\], expected \[2, 4\]; one weight"):
        attention_output(out, (wo_a, a_scale), (wo_b, b_scale), mix[0], mix[1][:, :3], mix[2], quantize=True)
