"""Attention inside an image against fp64, its rows alone and in batches, and what it refuses."""

import pytest
import torch

from deepinfer_kernels.dense_attention import dense_attention
from deepinfer_kernels.dense_attention.reference import TOLERANCE_BF16, TOLERANCE_FP32, make_inputs
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.testing import EDGE_SIZES, assert_bitwise_equal, assert_close, assert_rows_keep_their_bits
from deepinfer_kernels.tiling import REFERENCE_KEY_TILE as TILE

HEADS, HEAD_DIM = 2, 16
SCALE = HEAD_DIM**-0.5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(num_queries: int, num_keys: int, dtype: torch.dtype, device: str, head_dim: int = HEAD_DIM) -> Inputs:
    return make_inputs(num_queries, num_keys, HEADS, head_dim, dtype, torch.Generator().manual_seed(5), device)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), v.double())


@pytest.mark.parametrize("num_keys", [1, TILE - 1, TILE, TILE + 1, 200])
@pytest.mark.parametrize("num_queries", EDGE_SIZES)
def test_rows_are_a_softmax_over_all_keys(num_queries: int, num_keys: int, device: str) -> None:
    for dtype, atol in ((torch.float32, TOLERANCE_FP32), (torch.bfloat16, TOLERANCE_BF16)):
        q, k, v = _inputs(num_queries, num_keys, dtype, device)
        got = dense_attention(q, k, v, SCALE)
        assert got.dtype == dtype
        assert_close(got.double(), _exact(q, k, v, SCALE).to(got.device), atol, f"{num_queries} x {num_keys}, {dtype}")


def test_the_released_head_width(device: str) -> None:
    q, k, v = _inputs(70, 130, torch.float32, device, head_dim=64)
    assert_close(dense_attention(q, k, v, 64**-0.5).double(), _exact(q, k, v, 64**-0.5), TOLERANCE_FP32, "width 64")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_keeps_its_bits_in_any_batch(dtype: torch.dtype, device: str) -> None:
    q, k, v = _inputs(77, 100, dtype, device)
    assert_rows_keep_their_bits(lambda rows: dense_attention(q[rows], k, v, SCALE), 77, "dense_attention")


def test_slices_of_one_projection_give_the_bits_of_copies(device: str) -> None:
    q, k, v = _inputs(40, 40, torch.bfloat16, device)
    packed = torch.stack([q, k, v], dim=1).reshape(40, 3, HEADS, HEAD_DIM)
    want = dense_attention(q, k, v, SCALE)
    assert_bitwise_equal(dense_attention(packed[:, 0], packed[:, 1], packed[:, 2], SCALE), want, "slices")


def test_nan_of_one_query_stays_in_its_row(device: str) -> None:
    q, k, v = _inputs(20, 70, torch.float32, device)
    want = dense_attention(q, k, v, SCALE)
    q[3] = float("nan")
    got = dense_attention(q, k, v, SCALE)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, k, v = _inputs(3, 4, torch.float32, "cpu")
    with pytest.raises(ShapeError, match="dense_attention: v"):
        dense_attention(q, k, v[:3], SCALE)
    with pytest.raises(ShapeError, match="at least one key"):
        dense_attention(q, k[:0], v[:0], SCALE)
    with pytest.raises(ShapeError, match="multiple of 16"):
        dense_attention(q[..., :8], k[..., :8], v[..., :8], SCALE)
    with pytest.raises(UnsupportedError, match="dense_attention: k"):
        dense_attention(q, k.double(), v, SCALE)
