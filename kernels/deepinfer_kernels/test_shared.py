"""The shared modules: comparisons, row tiles, the cache of dense weights, pointwise functions."""

import gc

import pytest
import torch

from deepinfer_kernels import dense_cache, pointwise
from deepinfer_kernels.row_tiles import tiled_matmul
from deepinfer_kernels.testing import (
    EDGE_SIZES,
    assert_bitwise_equal,
    assert_close,
    assert_rows_keep_their_bits,
    assert_within_ulps_bf16,
    ulp_distance_bf16,
)


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    dense_cache.clear()
    dense_cache.set_budget_bytes(1 << 30)


def test_bitwise_comparison_names_the_first_difference_and_tells_zeros_apart() -> None:
    want = torch.tensor([[0.0, 1.0], [2.0, float("nan")]])
    assert_bitwise_equal(want.clone(), want, "same")
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ; first at \(0, 0\): got -0.0, expected 0.0"):
        assert_bitwise_equal(torch.tensor([[-0.0, 1.0], [2.0, float("nan")]]), want, "rows")
    with pytest.raises(AssertionError, match=r"got \[2, 2\] torch.float64"):
        assert_bitwise_equal(want.double(), want, "dtype")


def test_close_comparison_rejects_nan_against_a_number() -> None:
    want = torch.tensor([1.0, float("inf"), float("nan")])
    assert_close(torch.tensor([1.001, float("inf"), float("nan")]), want, 0.01, "near")
    with pytest.raises(AssertionError, match="1 of 3 elements differ"):
        assert_close(torch.tensor([1.0, float("inf"), 3.0]), want, 0.01, "nan")


def test_ulp_distance_counts_bf16_numbers_across_zero() -> None:
    tiny = 2.0**-133  # smallest positive bf16
    got = torch.tensor([1.0, -0.0, tiny, -1.0]).bfloat16()
    want = torch.tensor([1.0078125, 0.0, -tiny, 1.0]).bfloat16()
    assert ulp_distance_bf16(got, want).tolist() == [1, 0, 2, 2 * 0x3F80]
    with pytest.raises(AssertionError, match="allowed 1 bf16 ulp"):
        assert_within_ulps_bf16(got, want, 1, "ulps")


@pytest.mark.parametrize("num_rows", [*EDGE_SIZES, 50])
def test_tiled_matmul_gives_the_product(num_rows: int, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 96, generator=generator).to(device)
    w = torch.randn(40, 96, generator=generator).to(device)
    assert_close(tiled_matmul(x, w), (x.double() @ w.double().t()).float(), 1e-4, "product")


@pytest.mark.parametrize(("num_out", "depth"), [(24, 384), (7, 33), (512, 128)])
def test_tiled_matmul_keeps_every_row_in_any_batch(num_out: int, depth: int, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, depth, generator=generator).to(device)
    w = torch.randn(num_out, depth, generator=generator).to(device)
    assert_rows_keep_their_bits(lambda rows: tiled_matmul(x[rows], w), 50, "tiled_matmul")
    alone = tiled_matmul(x, w)
    wide = torch.randn(50, depth + 5, generator=generator).to(device)
    wide[:, 2 : 2 + depth] = x
    assert_bitwise_equal(tiled_matmul(wide[:, 2 : 2 + depth], w), alone, "strided rows")


def test_row_comparison_notices_a_product_that_follows_the_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(50, 1024, generator=generator), torch.randn(24, 1024, generator=generator)
    with pytest.raises(AssertionError, match="rows 0:50 in one batch"):
        assert_rows_keep_their_bits(lambda rows: x[rows] @ w.t(), 50, "plain matmul")


def test_row_comparison_notices_a_sigmoid_that_follows_the_place() -> None:
    x = torch.randn(61, 24, generator=torch.Generator().manual_seed(3)) * 8
    with pytest.raises(AssertionError, match="in one batch"):
        assert_rows_keep_their_bits(lambda rows: torch.sigmoid(x[rows].contiguous()), 61, "torch.sigmoid")


def test_nan_in_one_row_of_a_tile_stays_there(device: str) -> None:
    x, w = torch.ones(20, 32, device=device), torch.ones(8, 32, device=device)
    want = tiled_matmul(x, w)
    x[3] = float("nan")
    got = tiled_matmul(x, w)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_bitwise_equal(got, want, "other rows")


def _counting_make(weight: torch.Tensor, calls: list[int]) -> torch.Tensor:
    calls.append(1)
    return weight.float() * 2


def test_dense_weight_is_made_once_and_forgotten_with_its_key() -> None:
    calls: list[int] = []
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    twin = weight.clone()
    first = dense_cache.dense(weight, lambda: _counting_make(twin, calls))
    second = dense_cache.dense(weight, lambda: _counting_make(twin, calls))
    assert first is second
    assert len(calls) == 1
    assert dense_cache.used_bytes() == 64
    del weight
    gc.collect()
    assert dense_cache.used_bytes() == 0


def test_dense_weight_is_made_again_after_a_write_or_another_scale() -> None:
    calls: list[int] = []
    weight, scale, other = torch.ones(4, 4), torch.ones(1), torch.ones(1)
    for depends_on in ((scale,), (scale,), (other,)):
        dense_cache.dense(weight, lambda: _counting_make(weight, calls), depends_on=depends_on)
    assert len(calls) == 2
    weight.add_(1)
    got = dense_cache.dense(weight, lambda: _counting_make(weight, calls), depends_on=(other,))
    assert len(calls) == 3
    assert float(got[0, 0]) == 4.0


def test_weight_beyond_the_budget_is_made_on_every_call() -> None:
    calls: list[int] = []
    weight = torch.ones(4, 4)
    dense_cache.set_budget_bytes(63)
    for _ in range(3):
        dense_cache.dense(weight, lambda: _counting_make(weight, calls))
    assert len(calls) == 3
    assert dense_cache.used_bytes() == 0


@pytest.mark.parametrize("name", ["gelu", "sigmoid", "silu", "softplus"])
def test_pointwise_values_do_not_depend_on_the_place(name: str, device: str) -> None:
    function = getattr(pointwise, name)
    x = torch.randn(61, 24, generator=torch.Generator().manual_seed(3)).to(device) * 8
    want = getattr(torch.nn.functional, name)(x.double()).float()
    assert_close(function(x), want, 2e-6, name)
    assert_rows_keep_their_bits(lambda rows: function(x[rows].contiguous()), 61, name)


def test_pointwise_functions_keep_their_limits() -> None:
    x = torch.tensor([-200.0, 200.0])
    assert pointwise.sigmoid(x).tolist() == [0.0, 1.0]
    assert pointwise.silu(x).tolist() == [0.0, 200.0]
    assert pointwise.gelu(x).tolist() == [0.0, 200.0]
    assert pointwise.softplus(x).tolist() == [0.0, 200.0]


def test_memory_from_empty_is_poisoned() -> None:
    assert bool(torch.empty(3).isnan().all())
    assert torch.empty(2, dtype=torch.uint8).tolist() == [0xAA, 0xAA]
    assert bool(torch.ones(2).new_empty(2).isnan().all())
