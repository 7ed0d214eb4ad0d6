"""The end of the mixture of experts against the operations it joins, and row by row."""

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.experts_output import experts_output
from deepinfer_kernels.experts_output.reference import make_inputs
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

Inputs = tuple[torch.Tensor, ...]


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> Inputs:
    return make_inputs(num_rows, 97, dtype, device, torch.Generator().manual_seed(57))


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_gives_the_bits_of_the_operations_it_joins(num_rows: int, dtype: torch.dtype, device: str) -> None:
    routed, shared, *mix = _inputs(num_rows, dtype, device)
    want = hc_post(moe_combine(routed, shared), *mix)
    assert_bitwise_equal(experts_output(routed, shared, *mix), want, "streams")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    inputs = _inputs(40, torch.float32, device)
    assert_rows_keep_their_bits(lambda rows: experts_output(*(part[rows] for part in inputs)), 40, "experts_output")


def test_strided_streams_give_the_same_bits(device: str) -> None:
    routed, shared, streams, post, comb = _inputs(20, torch.float32, device)
    turned = streams.transpose(0, 1).contiguous().transpose(0, 1)
    want = experts_output(routed, shared, streams, post, comb)
    assert_bitwise_equal(experts_output(routed, shared, turned, post, comb), want, "other strides")


def test_nan_in_one_row_stays_there(device: str) -> None:
    inputs = _inputs(20, torch.float32, device)
    want = experts_output(*inputs)
    inputs[1][3] = float("nan")
    got = experts_output(*inputs)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    routed, shared, *mix = _inputs(2, torch.float32, device)
    with pytest.raises(ShapeError, match=r"^experts_output: routed is \[2, 0, 97\], expected at least one slot;"):
        experts_output(routed[:, :0], shared, *mix)
    with pytest.raises(ShapeError, match=r"^experts_output: shared is \[1, 97\], expected \[2, 97\]; one row"):
        experts_output(routed, shared[:1], *mix)
    with pytest.raises(UnsupportedError, match=r"^experts_output: shared is torch.bfloat16, expected torch.float32;"):
        experts_output(routed, shared.bfloat16(), *mix)
