"""The shared expert against the operations it joins, and row by row."""

from functools import partial

import pytest
import torch

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.hc_norm import hc_norm
from deepinfer_kernels.linear import mxfp8_linear
from deepinfer_kernels.shared_expert import shared_expert
from deepinfer_kernels.shared_expert.reference import make_inputs
from deepinfer_kernels.swiglu import swiglu
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

WIDTH, INNER, LIMIT = 160, 96, 10.0
Inputs = tuple[torch.Tensor, ...]


def _inputs(num_rows: int, dtype: torch.dtype, device: str, quantize: bool) -> tuple[Inputs, torch.Tensor]:
    """Inputs whose first tensor is normed, and its prepared rows."""
    x, *weights = make_inputs(num_rows, WIDTH, INNER, dtype, device, torch.Generator().manual_seed(56))
    ones = torch.ones(num_rows, 1, device=device), torch.ones(WIDTH, device=device)
    given = hc_norm(x.unsqueeze(1), *ones, 1e-20, quantize=quantize, for_experts=False)
    return (given.x, *weights), given.rows


def _run(inputs: Inputs, rows: torch.Tensor, quantize: bool) -> torch.Tensor:
    x, w1, s1, w3, s3, w2, s2 = inputs
    return shared_expert(rows, (w1, s1), (w3, s3), (w2, s2), limit=LIMIT, out_dtype=x.dtype, quantize=quantize)


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [False, True])
def test_it_gives_the_bits_of_the_operations_it_joins(
    num_rows: int, dtype: torch.dtype, quantize: bool, device: str
) -> None:
    inputs, rows = _inputs(num_rows, dtype, device, quantize)
    x, w1, s1, w3, s3, w2, s2 = inputs

    def multiply(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return mxfp8_linear(values, weight, scale, out_dtype=dtype, quantize_input=quantize)

    hidden = swiglu(multiply(x, w1, s1), multiply(x, w3, s3), LIMIT, None)
    assert_bitwise_equal(_run(inputs, rows, quantize), multiply(hidden, w2, s2), "shared expert")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    inputs, rows = _inputs(40, torch.float32, device, True)
    assert_rows_keep_their_bits(lambda some: _run(inputs, rows[some], True), 40, "shared_expert")


def test_nan_in_one_row_stays_there(device: str) -> None:
    inputs, rows = _inputs(20, torch.float32, device, True)
    want = _run(inputs, rows, True)
    rows = rows.clone()
    rows[3, 5] = float("nan")
    got = _run(inputs, rows, True)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    (_, w1, s1, w3, s3, w2, s2), rows = _inputs(2, torch.float32, device, True)
    run = partial(shared_expert, limit=LIMIT, out_dtype=torch.float32, quantize=True)
    with pytest.raises(ShapeError, match=r"^shared_expert: w3 is \[64, 160\], expected \[96, 160\]; gate and up"):
        run(rows, (w1, s1), (w3[:64], s3[:2]), (w2, s2))
    with pytest.raises(ShapeError, match=r"^shared_expert: w2 is \[96, 160\], expected \[96, 96\]; it reads"):
        run(rows, (w1, s1), (w3, s3), (w1, s1))
    with pytest.raises(ShapeError, match=r"^shared_expert: rows is \[2, 64\], expected rows prepared from 160 columns"):
        run(rows[:, :64], (w1, s1), (w3, s3), (w2, s2))
