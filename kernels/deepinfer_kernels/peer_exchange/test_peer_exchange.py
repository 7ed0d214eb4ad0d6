"""Exchanges over peer memory move every byte, wait for every rank, and compile for the GPUs."""

import re

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.compiling import compile_launch, launches_of
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.peer_exchange import PeerMemory, gather_columns, memory_bytes, merge_rows
from deepinfer_kernels.testing import run_interpreted


def peers(size: int = 2, half_bytes: int = 1 << 20) -> PeerMemory:
    return PeerMemory(
        rank=0,
        size=size,
        addresses=torch.zeros(size, dtype=torch.int64),
        epochs=torch.zeros(tiling.PEER_PROGRAMS, dtype=torch.int32),
        half_bytes=half_bytes,
    )


def test_two_ranks_exchange_every_byte_and_wait_for_each_other() -> None:
    exact, differences = run_interpreted("peer_exchange.interpreted_ranks").split()
    assert exact == "exact"
    assert int(differences) > 0, "a rank that does not wait has all words: the exchange is not exercised"


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_kernel_compiles_with_wide_stores_and_published_flags(is_cut: bool, capability: int) -> None:
    x, owner = torch.zeros(64, 4096, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
    (launch,) = launches_of(
        lambda: merge_rows(peers(), x, owner, is_cut=True) if is_cut else gather_columns(peers(), x)
    )
    ptx = compile_launch(launch, capability).asm["ptx"]
    assert "st.global.v4" in ptx, "words are written one by one"
    (publishes,) = re.finditer(r"atom\.global\.(sys\.release|release\.sys)\.exch", ptx)
    (waits,) = re.finditer(r"\.global\.(sys\.acquire|acquire\.sys)", ptx)
    assert "bar.sync" in ptx[: publishes.start()], "a flag may be seen before the words of other threads"
    assert "bar.sync" in ptx[waits.end() :], "a thread may read before the flag is seen"


@pytest.mark.parametrize("columns", [slice(0, 2), slice(1, 3), slice(2, 4)])
def test_a_row_that_begins_inside_a_word_is_copied(columns: slice) -> None:
    row = torch.arange(5, dtype=torch.int16)[None, columns]
    (launch,) = launches_of(lambda: gather_columns(peers(), row))
    assert launch.arguments["x_ptr"].view(torch.int16).tolist() == row[0].tolist()


def test_memory_holds_flags_and_two_halves() -> None:
    assert memory_bytes(2, 1 << 20) == 2 * 64 * 4 + (2 << 20)
    assert peers().holds(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert not peers().holds(torch.zeros(1, 3, dtype=torch.bfloat16))
    assert peers(half_bytes=32).holds(torch.zeros(9, 4), 2)
    assert not peers(half_bytes=16).holds(torch.zeros(1, 4), 2)


@pytest.mark.parametrize(("num_rows", "launches"), [(32, [32]), (33, [32, 1]), (70, [32, 32, 6])])
def test_more_rows_than_the_memory_holds_take_several_launches(num_rows: int, launches: list[int]) -> None:
    x, owner = torch.zeros(num_rows, 64), torch.zeros(num_rows, dtype=torch.int32)
    memory = peers(half_bytes=37 * 512)  # 37 rows of 128 words
    gathers = launches_of(lambda: gather_columns(memory, x))
    merges = launches_of(lambda: merge_rows(memory, torch.zeros(num_rows, 128), owner, is_cut=False))
    for found in (gathers, merges):
        assert [launch.arguments["num_rows"] for launch in found] == launches
        addresses = [launch.arguments["out_ptr"].data_ptr() for launch in found]
        assert [address - addresses[0] for address in addresses] == [512 * 32 * i for i in range(len(launches))]


def test_what_cannot_be_exchanged_is_refused() -> None:
    x, owner = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"a row of the result has 48 bytes, .* at most 32 bytes; use the group"):
        gather_columns(peers(half_bytes=32), x)
    with pytest.raises(UnsupportedError, match="3 x 2 bytes of each rank, expected whole words"):
        gather_columns(peers(), torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match=r"merge_rows: owner is \[3\] torch.int32, expected \[4\]"):
        merge_rows(peers(), x, owner[:3], is_cut=False)
    with pytest.raises(ShapeError, match="expected columns that 4 ranks divide"):
        merge_rows(peers(4), x, owner, is_cut=True)
    assert gather_columns(peers(), x[:0]).shape == (0, 12)
