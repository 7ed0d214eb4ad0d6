"""Exchanges between ranks of one host through memory that they map of each other."""

from dataclasses import dataclass

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.errors import ShapeError, UnsupportedError

WORD_BYTES = 4
_ALIGNED_ROWS = 16
"""Launches after the first begin at a multiple of it: so pointers keep the alignment that a kernel is compiled for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class PeerMemory:
    """Memory of every rank of a group, as this rank sees it.

    Attributes:
        rank: this one.
        size: number of ranks.
        addresses: [size] int64 on the device: where the ``memory_bytes(size, half_bytes)`` of each rank begin, zeros at
            first.
        epochs: [PEER_PROGRAMS] int32 on the device: exchanges that each program has made, zeros at first.
        half_bytes: largest result of one launch, a multiple of 16; more rows take several.
    """

    rank: int
    size: int
    addresses: torch.Tensor
    epochs: torch.Tensor
    half_bytes: int

    def holds(self, x: torch.Tensor, num_ranks: int = 1) -> bool:
        """Whether rows as wide as those of ``x`` can be exchanged: whole words, and ``num_ranks`` of them fit."""
        row_bytes = x.shape[-1] * x.element_size()
        return row_bytes % WORD_BYTES == 0 and 0 < num_ranks * row_bytes <= self.half_bytes


def memory_bytes(size: int, half_bytes: int) -> int:
    """Bytes of a rank's memory for exchanges of ``size`` ranks: flags, then two halves."""
    return size * tiling.PEER_PROGRAMS * WORD_BYTES + 2 * half_bytes


def gather_columns(peers: PeerMemory, x: torch.Tensor) -> torch.Tensor:
    """Put the columns of every rank side by side. All ranks call it, in one order, on one stream.

    Args:
        peers: the ranks.
        x: [num_rows, num_columns] of any dtype, the same shape on every rank.

    Returns:
        [num_rows, size * num_columns], dtype of ``x``, a new tensor.

    Raises:
        UnsupportedError: ``peers`` does not hold a row of the result, or rows are no whole words.

    Invariance: exact; bytes are copied.
    """
    num_rows, num_columns = x.shape
    out = torch.empty((num_rows, peers.size * num_columns), dtype=x.dtype, device=x.device)
    _exchange(peers, x, None, out, is_cut=False)
    return out


def merge_rows(peers: PeerMemory, x: torch.Tensor, owner: torch.Tensor, *, is_cut: bool) -> torch.Tensor:
    """Take every row from the rank that owns it. All ranks call it, in one order, on one stream.

    Args:
        peers: the ranks.
        x: [num_rows, num_columns] of any dtype, the same shape on every rank; rows of other owners have no meaning.
        owner: [num_rows] int32, 0 ... size - 1, the same on every rank.
        is_cut: whether rank i takes the i-th equal run of columns only.

    Returns:
        [num_rows, num_columns], with ``is_cut`` [num_rows, num_columns / size], dtype of ``x``, a new tensor.

    Raises:
        ShapeError: ``owner`` does not fit, or the ranks do not divide the columns.
        UnsupportedError: ``peers`` does not hold a row of the result, or rows are no whole words.

    Invariance: exact; bytes are copied.
    """
    num_rows, num_columns = x.shape
    if owner.shape != (num_rows,) or owner.dtype != torch.int32:
        raise ShapeError(
            f"merge_rows: owner is {list(owner.shape)} {owner.dtype}, expected [{num_rows}] torch.int32; "
            "pass one owner per row of x"
        )
    if is_cut and num_columns % peers.size != 0:
        raise ShapeError(
            f"merge_rows: x is {list(x.shape)}, expected columns that {peers.size} ranks divide; pass is_cut=False"
        )
    shape = (num_rows, num_columns // peers.size if is_cut else num_columns)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _exchange(peers, x, owner.contiguous(), out, is_cut=is_cut)
    return out


def _exchange(
    peers: PeerMemory, x: torch.Tensor, owner: torch.Tensor | None, out: torch.Tensor, *, is_cut: bool
) -> None:
    """Exchange as many rows at a time as the memory holds."""
    num_rows, row_bytes = out.shape[0], out.shape[1] * out.element_size()
    if out.numel() == 0:
        return
    columns = out.shape[1] if owner is not None else out.shape[1] // peers.size
    if not peers.holds(out[:, :columns], out.shape[1] // columns):
        raise UnsupportedError(
            f"peer exchange: a row of the result has {row_bytes} bytes, {columns} x {out.element_size()} bytes of each "
            f"rank, expected whole words of {WORD_BYTES} bytes and at most {peers.half_bytes} bytes; use the group"
        )
    from deepinfer_kernels.peer_exchange.triton_kernel import peer_exchange_triton

    words = columns * out.element_size() // WORD_BYTES
    step = peers.half_bytes // row_bytes
    step -= step % _ALIGNED_ROWS if step > _ALIGNED_ROWS else 0
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        owners = None if owner is None else owner[rows]
        peer_exchange_triton(peers, _words(x[rows]), owners, _words(out[rows]), words, is_cut=is_cut)


def _words(x: torch.Tensor) -> torch.Tensor:
    """[size in words] int32; a copy where ``x`` has gaps or begins inside a word."""
    x = x.contiguous().view(-1)
    if x.storage_offset() * x.element_size() % WORD_BYTES != 0:
        x = x.clone()
    return x.view(torch.int32)
