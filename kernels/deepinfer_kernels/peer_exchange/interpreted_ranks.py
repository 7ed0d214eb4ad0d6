"""Ranks as processes that share memory, each with the exchange kernel in Triton's interpreter.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.peer_exchange.interpreted_ranks`` prints ``exact`` for exchanges in
turn, and how many values differ where a rank does not wait for the others.
"""

# mypy: allow-untyped-calls
# ruff: noqa: T201

import time
from dataclasses import replace
from unittest.mock import patch

import torch
from torch.multiprocessing.spawn import spawn

from deepinfer_kernels import tiling
from deepinfer_kernels.peer_exchange import PeerMemory, gather_columns, memory_bytes, merge_rows

SIZE, HALF_BYTES, GUARD = 2, 1 << 23, 0x5A5A5A5A
_LONG = 3 * tiling.PEER_BLOCK + 5  # words: several steps of a program where there are some hundred rows
# (rows, 16-bit columns): nothing, less than a program moves, rows that are no multiple of 16 bytes, all programs twice,
# and twice with the larger steps.
SHAPES = ((0, 8), (1, 2), (3, 34), (45, 64), (2, 2 * _LONG), (64, 2 * 64 * 33), (65, 2 * (tiling.PEER_LARGE_BLOCK + 8)))


def _held(rank: int, number: int, num_rows: int, num_columns: int) -> torch.Tensor:
    """What a rank holds for an exchange; 16-bit codes of any value, NaN among them."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    codes = torch.randint(-(1 << 15), 1 << 15, (num_rows, num_columns), generator=generator)
    return codes.to(torch.int16).view(torch.bfloat16)


def _peers(rank: int, memory: torch.Tensor) -> PeerMemory:
    addresses = torch.tensor([memory[other].data_ptr() for other in range(SIZE)])
    epochs = torch.zeros(tiling.PEER_PROGRAMS, dtype=torch.int32)
    return PeerMemory(rank=rank, size=SIZE, addresses=addresses, epochs=epochs, half_bytes=HALF_BYTES)


def _differences(got: torch.Tensor, want: torch.Tensor) -> int:
    assert got.shape == want.shape
    return int((got.view(torch.int16) != want.view(torch.int16)).sum())


def _exchange_all(peers: PeerMemory) -> int:
    """Values that differ over all exchanges of a rank."""
    few = replace(peers, half_bytes=20 * SIZE * 64)  # bytes of some rows: several launches
    wrong = 0
    for number, (num_rows, num_columns) in enumerate(SHAPES):
        for memory in (peers, few) if num_columns <= 64 else (peers,):
            wrong += _wrong(memory, number, num_rows, num_columns)
    return wrong


def _wrong(peers: PeerMemory, number: int, num_rows: int, num_columns: int) -> int:
    """Values that differ over the exchanges of one shape."""
    held = [_held(rank, number, num_rows, num_columns) for rank in range(SIZE)]
    x = held[peers.rank]
    wrong = _differences(gather_columns(peers, x), torch.cat(held, dim=1))
    owner = torch.randint(0, SIZE, (num_rows,), generator=torch.Generator().manual_seed(number)).int()
    merged = torch.stack(held)[owner.long(), torch.arange(num_rows)]
    wrong += _differences(merge_rows(peers, x, owner, is_cut=False), merged)
    width = num_columns // SIZE
    if width * x.element_size() % 4 == 0:
        mine = merged[:, peers.rank * width : (peers.rank + 1) * width]
        wrong += _differences(merge_rows(peers, x, owner, is_cut=True), mine)
    return wrong


def _rank(rank: int, memory: torch.Tensor, found: torch.Tensor) -> None:
    torch.set_num_threads(1)
    with patch("deepinfer_kernels.peer_exchange.triton_kernel.starts_early", lambda device: False):
        peers = _peers(rank, memory)
        found[rank, 0] = _exchange_all(peers)
        # Flags as of a later exchange: this rank no longer waits, and the other one comes late.
        memory[rank, : SIZE * tiling.PEER_PROGRAMS] = 1 << 20
        time.sleep(0.0 if rank == 0 else 3.0)
        x = _held(rank, 99, 8, 64)
        want = torch.cat([_held(other, 99, 8, 64) for other in range(SIZE)], dim=1)
        found[rank, 1] = _differences(gather_columns(peers, x), want)


def main() -> None:
    """Run the ranks and print what they found."""
    words = memory_bytes(SIZE, HALF_BYTES) // 4
    memory = torch.zeros(SIZE, words + 4, dtype=torch.int32)
    memory[:, words:] = GUARD
    memory.share_memory_()
    found = torch.full((SIZE, 2), -1).share_memory_()
    spawn(_rank, (memory, found), nprocs=SIZE)
    assert bool((memory[:, words:] == GUARD).all()), "a rank wrote behind the memory"
    print("exact" if not found[:, 0].any() else f"{found[:, 0].tolist()} values differ")
    print(int(found[0, 1]))


if __name__ == "__main__":
    main()
