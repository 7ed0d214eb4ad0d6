"""The Engram lookup against a plain loop, at the edges, and row independence."""

import re

import pytest
import torch

from deepinfer_kernels.engram_lookup import engram_lookup
from deepinfer_kernels.engram_lookup.reference import make_inputs
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.testing import assert_bitwise_equal

WIDTH = 64
NUM_COLUMNS = 6
NUM_ROWS = 101


def inputs(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_tokens, NUM_COLUMNS, NUM_ROWS, WIDTH, torch.Generator().manual_seed(3), device)


def by_hand(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same in fp64, one element group at a time."""
    values = table.cpu().double()
    factors = torch.pow(2.0, scale.cpu().double() - 127)
    out = torch.empty(rows.shape[0], rows.shape[1] * table.shape[1], dtype=torch.float64)
    for t, line in enumerate(rows.tolist()):
        for c, row in enumerate(line):
            for block in range(table.shape[1] // 32):
                columns = slice(32 * block, 32 * block + 32)
                start = c * table.shape[1] + 32 * block
                out[t, start : start + 32] = values[row, columns] * factors[row, block]
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_the_rows_are_dequantised_and_joined_in_column_order(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    table, scale, rows = inputs(num_tokens, device)
    got = engram_lookup(table, scale, rows, dtype)
    assert_bitwise_equal(got.cpu(), by_hand(table, scale, rows).to(dtype), label="lookup")


def test_every_row_keeps_its_bits_in_any_batch(device: str) -> None:
    table, scale, rows = inputs(19, device)
    batch = engram_lookup(table, scale, rows, torch.float32)
    for t in range(19):
        alone = engram_lookup(table, scale, rows[t : t + 1], torch.float32)
        assert_bitwise_equal(batch[t : t + 1], alone, label=f"row {t}")


def test_strided_arguments_read_like_contiguous_ones(device: str) -> None:
    table, scale, rows = inputs(8, device)
    strided = rows[::2, 1::2]
    assert not strided.is_contiguous()
    got = engram_lookup(table, scale, strided, torch.float32)
    want = engram_lookup(table, scale, strided.contiguous(), torch.float32)
    assert_bitwise_equal(got, want, label="strided")
    half_table, half_scale = table[:, :32], scale[:, :1]
    assert not half_table.is_contiguous()
    got = engram_lookup(half_table, half_scale, rows, torch.float32)
    want = engram_lookup(half_table.contiguous(), half_scale.contiguous(), rows, torch.float32)
    assert_bitwise_equal(got, want, label="strided table")


def test_nan_in_a_table_row_reaches_only_the_tokens_that_name_it(device: str) -> None:
    table, scale, rows = inputs(12, device)
    rows = torch.where(rows == 7, 8, rows)
    rows[5, 2] = 7
    table.view(torch.uint8)[7] = 0x7F  # NaN of e4m3fn
    got = engram_lookup(table, scale, rows, torch.float32).view(12, NUM_COLUMNS, WIDTH)
    is_nan = got.isnan()
    assert bool(is_nan[5, 2].all())
    assert int(is_nan.sum()) == WIDTH


def test_a_row_outside_the_table_is_an_error_on_cpu() -> None:
    table, scale, rows = inputs(2, "cpu")
    rows[1, 3] = NUM_ROWS
    with pytest.raises(IndexError):
        engram_lookup(table, scale, rows, torch.float32)


def test_arguments_that_do_not_fit_are_named() -> None:
    table, scale, rows = inputs(3, "cpu")
    with pytest.raises(UnsupportedError, match=re.escape("engram_lookup: table is torch.uint8, expected torch.float8")):
        engram_lookup(table.view(torch.uint8), scale, rows, torch.float32)
    with pytest.raises(UnsupportedError, match=re.escape("engram_lookup: scale is torch.float8_e8m0fnu, expected")):
        engram_lookup(table, scale.view(torch.float8_e8m0fnu), rows, torch.float32)
    with pytest.raises(UnsupportedError, match=re.escape("engram_lookup: rows is torch.int64, expected torch.int32")):
        engram_lookup(table, scale, rows.long(), torch.float32)
    with pytest.raises(UnsupportedError, match=re.escape("engram_lookup: dtype is torch.float16, expected")):
        engram_lookup(table, scale, rows, torch.float16)
    with pytest.raises(ShapeError, match=re.escape("engram_lookup: scale is [101, 1], expected [101, 2]")):
        engram_lookup(table, scale[:, :1], rows, torch.float32)
    with pytest.raises(ShapeError, match=re.escape("engram_lookup: table is [101, 48], expected a last axis")):
        engram_lookup(table[:, :48], scale, rows, torch.float32)
    with pytest.raises(ShapeError, match=re.escape("engram_lookup: rows is [6], expected 2 axes")):
        engram_lookup(table, scale, rows[0], torch.float32)
