"""Latent queries and keys against the operations they join, and row by row."""

from functools import partial

import pytest
import torch

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.hc_norm import hc_norm
from deepinfer_kernels.latent_projections import latent_projections
from deepinfer_kernels.latent_projections.reference import make_inputs
from deepinfer_kernels.linear import mxfp8_linear, mxfp8_prepared_linear
from deepinfer_kernels.linear.weights import stacked
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_rows_keep_their_bits

EPS = 1e-20
Q_RANK, KV_WIDTH, DEPTH = 96, 64, 160
Inputs = tuple[torch.Tensor, ...]


def _inputs(num_rows: int, dtype: torch.dtype, device: str) -> Inputs:
    return make_inputs(num_rows, Q_RANK, KV_WIDTH, DEPTH, dtype, device, torch.Generator().manual_seed(53))


def _prepared(x: torch.Tensor, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x as the norm of one stream gives it, and its rows."""
    pre = torch.ones(x.shape[0], 1, device=x.device)
    weight = torch.ones(x.shape[1], device=x.device)
    given = hc_norm(x.unsqueeze(1), pre, weight, EPS, quantize=quantize, for_experts=False)
    return given.x, given.rows


def _run(inputs: Inputs, rows: torch.Tensor, dtype: torch.dtype, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _, q, q_scale, kv, kv_scale, q_norm, kv_norm = inputs
    weights = (q, q_scale), (kv, kv_scale)
    return latent_projections(rows, *weights, q_norm, kv_norm, EPS, out_dtype=dtype, quantize=quantize)


@pytest.mark.parametrize("num_rows", EDGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [False, True])
def test_it_gives_the_bits_of_the_operations_it_joins(
    num_rows: int, dtype: torch.dtype, quantize: bool, device: str
) -> None:
    inputs = _inputs(num_rows, dtype, device)
    x, rows = _prepared(inputs[0], quantize)
    _, q, q_scale, kv, kv_scale, q_norm, kv_norm = inputs

    def project(weight: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return rms_norm(mxfp8_linear(x, weight, scale, out_dtype=dtype, quantize_input=quantize), norm, EPS)

    query, key_value = _run(inputs, rows, dtype, quantize)
    assert_bitwise_equal(key_value, project(kv, kv_scale, kv_norm), "keys")
    next_weight = torch.randn(80, Q_RANK, generator=torch.Generator().manual_seed(54)).to(device, torch.float8_e4m3fn)
    next_scale = torch.full((3, 3), 120, dtype=torch.uint8, device=device)
    want = mxfp8_linear(
        project(q, q_scale, q_norm), next_weight, next_scale, out_dtype=torch.float32, quantize_input=quantize
    )
    got = mxfp8_prepared_linear(query, next_weight, next_scale, out_dtype=torch.float32)
    assert_bitwise_equal(got, want, "product of the queries")


def test_weights_in_one_block_of_memory_give_the_same_bits(device: str) -> None:
    inputs = _inputs(20, torch.bfloat16, device)
    _, rows = _prepared(inputs[0], True)
    both, scales = stacked(inputs[1], inputs[3]), stacked(inputs[2], inputs[4])
    views = (inputs[0], both[:Q_RANK], scales[:3], both[Q_RANK:], scales[3:], *inputs[5:])
    assert stacked(views[1], views[3]).data_ptr() == both.data_ptr(), "neighbours are not copied"
    for got, want in zip(
        _run(views, rows, torch.bfloat16, True), _run(inputs, rows, torch.bfloat16, True), strict=True
    ):
        assert_bitwise_equal(got, want, "views")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    inputs = _inputs(40, torch.float32, device)
    _, rows = _prepared(inputs[0], True)

    def run(some: slice) -> torch.Tensor:
        return torch.cat([part.float() for part in _run(inputs, rows[some], torch.float32, True)], dim=1)

    assert_rows_keep_their_bits(run, 40, "latent_projections")


def test_nan_in_one_row_stays_there(device: str) -> None:
    inputs = _inputs(20, torch.float32, device)
    _, rows = _prepared(inputs[0], True)
    want = _run(inputs, rows, torch.float32, True)
    rows = rows.clone()
    rows[3, 5] = float("nan")
    for part, wanted in zip(_run(inputs, rows, torch.float32, True), want, strict=True):
        assert int(part[3].isnan().sum()) >= KV_WIDTH
        part[3] = wanted[3]
        assert_bitwise_equal(part, wanted, "other rows")


def test_errors_name_the_argument_and_the_rule(device: str) -> None:
    x, q, q_scale, kv, kv_scale, q_norm, kv_norm = _inputs(2, torch.float32, device)
    project = partial(latent_projections, out_dtype=torch.float32, quantize=True)
    with pytest.raises(ShapeError, match=r"^latent_projections: rows is \[2, 90\], expected rows prepared from 160"):
        project(x[:, :90], (q, q_scale), (kv, kv_scale), q_norm, kv_norm, EPS)
    with pytest.raises(ShapeError, match=r"^latent_projections: q_weight is \[80, 160\] before \[64, 160\], expected"):
        project(x, (q[:80], q_scale), (kv, kv_scale), q_norm[:80], kv_norm, EPS)
    with pytest.raises(ShapeError, match=r"^latent_projections: kv_norm is \[60\], expected \[64\]; one value per row"):
        project(x, (q, q_scale), (kv, kv_scale), q_norm, kv_norm[:60], EPS)
