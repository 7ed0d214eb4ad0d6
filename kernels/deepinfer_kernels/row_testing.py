"""Tests on the device: a row has one set of bits in every batch, alone, and when a CUDA graph replays it."""

from collections.abc import Callable

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

NUM_ROWS = 8192
SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 1024, 1025, 4096, 8192)
ALONE = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 1023, 1024, 4095, 4096, 8190, 8191)


def assert_one_set_of_bits(run: Callable[[slice], torch.Tensor], num_rows: int, label: str) -> None:
    """Fail unless every row of the batch of ``num_rows`` has the same bits in smaller batches and alone.

    Args:
        run: computes the rows of one slice of the inputs, one row of the result per row.
        num_rows: rows of all inputs.
        label: begins the message.
    """
    batch = run(slice(0, num_rows))
    for size in SIZES:
        if size < num_rows:
            assert_bitwise_equal(run(slice(0, size)), batch[:size], f"{label}: first {size} rows")
            last = slice(num_rows - size, num_rows)
            assert_bitwise_equal(run(last), batch[last], f"{label}: last {size} rows")
    for row in ALONE:
        if row < num_rows:
            alone = slice(row, row + 1)
            assert_bitwise_equal(run(alone), batch[alone], f"{label}: row {row} alone")
    # Every row, not only some: in batches of 3 that begin anywhere.
    few = slice(0, min(num_rows, 600))
    threes = [run(slice(start, min(start + 3, few.stop))) for start in range(0, few.stop, 3)]
    assert_bitwise_equal(torch.cat(threes), batch[few], f"{label}: all rows by threes")


def assert_graph_gives_eager_bits(run: Callable[[], torch.Tensor], label: str) -> None:
    """Fail unless a captured graph replays the bits of the eager call."""
    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    if got.is_floating_point():
        got.fill_(float("nan"))
    else:
        got.zero_()
    graph.replay()
    assert_bitwise_equal(got, want, f"{label}: graph")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance in the Frobenius norm over the norm of ``want``, in fp64; NaN stays NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())
