"""Rows of other ranks over peer memory, in one launch: every rank writes into the memory of the others and waits.

Program i of a rank moves the same words as program i of every other, so only these wait for each other. Each writes its
words to the others, raises its flag there, waits for theirs, and copies what has come. Words land in one of two halves
of the memory by the parity of the exchange: a rank that is one exchange ahead writes where nobody reads, and it cannot
be two ahead, because it waits for a flag that a slower rank raises behind the reads of its exchange before.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.dependent_launch import starts_early, wait_for_inputs

if TYPE_CHECKING:
    from deepinfer_kernels.peer_exchange import PeerMemory


@triton.jit
def _memory_of(addresses_ptr, rank: tl.constexpr):
    """int32 words of a rank's memory: flags first, one of every program of every rank, then the halves."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _peer_exchange_kernel(
    x_ptr,
    owner_ptr,
    out_ptr,
    addresses_ptr,
    epochs_ptr,
    num_rows,
    words,
    half_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    IS_MERGED: tl.constexpr,
    IS_CUT: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    wait_for_inputs(IS_EARLY)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    place = SIZE * NUM_PROGRAMS + (epoch & 1) * half_words
    total = num_rows * words
    for start in range(program * BLOCK, total, NUM_PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        row, word = i // words, i % words
        is_mine = i < total
        if IS_MERGED:
            is_mine = is_mine & (tl.load(owner_ptr + row, mask=is_mine, other=-1) == RANK)
            target = i
        else:
            target = (row * SIZE + RANK) * words + word
        if not IS_CUT:
            value = tl.load(x_ptr + i, mask=is_mine, other=0)
        for other in tl.static_range(SIZE):
            if IS_CUT:
                value = tl.load(x_ptr + (row * SIZE + other) * words + word, mask=is_mine, other=0)
            if other == RANK:
                tl.store(out_ptr + target, value, mask=is_mine)
            else:
                tl.store(_memory_of(addresses_ptr, other) + place + target, value, mask=is_mine)
    tl.debug_barrier()  # every thread has written: the flags below publish the words of all
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag_ptr = _memory_of(addresses_ptr, other) + RANK * NUM_PROGRAMS + program
            tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
    here = _memory_of(addresses_ptr, RANK)
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag_ptr = here + other * NUM_PROGRAMS + program
            # a difference, so that the count may run over; a rank may be one exchange ahead
            while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - epoch < 0:
                pass
    tl.debug_barrier()
    for start in range(program * BLOCK, total, NUM_PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        row, word = i // words, i % words
        is_word = i < total
        if IS_MERGED:
            has_come = is_word & (tl.load(owner_ptr + row, mask=is_word, other=RANK) != RANK)
            value = tl.load(here + place + i, mask=has_come, other=0, cache_modifier=".cg")
            tl.store(out_ptr + i, value, mask=has_come)
        else:
            for other in tl.static_range(SIZE):
                if other != RANK:
                    target = (row * SIZE + other) * words + word
                    value = tl.load(here + place + target, mask=is_word, other=0, cache_modifier=".cg")
                    tl.store(out_ptr + target, value, mask=is_word)
    tl.store(epochs_ptr + program, epoch)


def peer_exchange_triton(
    peers: "PeerMemory", x: torch.Tensor, owner: torch.Tensor | None, out: torch.Tensor, words: int, *, is_cut: bool
) -> None:
    """Launch on int32 views of contiguous ``x`` and ``out``, rows of ``words`` of each rank; ``owner`` int32: merge."""
    early = starts_early(x.device)
    num_rows = out.numel() // (words if owner is not None else words * peers.size)
    is_large = num_rows * words > tiling.PEER_PROGRAMS * tiling.PEER_LARGE_BLOCK
    _peer_exchange_kernel[(tiling.PEER_PROGRAMS,)](
        x,
        x if owner is None else owner,
        out,
        peers.addresses,
        peers.epochs,
        num_rows,
        words,
        peers.half_bytes // 4,
        RANK=peers.rank,
        SIZE=peers.size,
        IS_MERGED=owner is not None,
        IS_CUT=is_cut,
        NUM_PROGRAMS=tiling.PEER_PROGRAMS,
        BLOCK=tiling.PEER_LARGE_BLOCK if is_large else tiling.PEER_BLOCK,
        IS_EARLY=early,
        num_warps=8,
        launch_pdl=early,
    )
