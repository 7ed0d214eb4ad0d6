"""A second stream of a GPU for work that the operations right behind it do not need."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_ROWS = 16
"""Rows up to which it wins: on an H200, a layer took 0.87 of its time with 1 row, 0.95 with 16 and 1.06 with 64."""
MAX_ROWS_OF_RANKS = 64
"""The same where ranks share a layer: each has a part of its products, so more rows leave the card half empty."""


class SideStream:
    """Runs work beside the current stream; for many rows, and elsewhere than on an NVIDIA GPU, it runs in place.

    Few rows leave a GPU half empty, and no bit depends on what runs beside. What the work reads must live until
    ``join``: memory that is freed before could be written again by the current stream. A graph that captures the
    current stream captures the side stream with it.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """num_ranks: ranks that share every layer."""
        self._max_rows = MAX_ROWS if num_ranks == 1 else MAX_ROWS_OF_RANKS
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def fork(self, rows: torch.Tensor) -> Iterator[None]:
        """Work inside starts once everything before it on the current stream is done.

        Args:
            rows: [num_tokens, ...] the work is about.
        """
        device = rows.device
        if device.type != "cuda" or rows.shape[0] > self._max_rows:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, rows: torch.Tensor) -> None:
        """What follows on the current stream starts once the work beside it on these ``rows`` is done."""
        if self._stream is not None and rows.shape[0] <= self._max_rows:
            torch.cuda.current_stream(rows.device).wait_stream(self._stream)
