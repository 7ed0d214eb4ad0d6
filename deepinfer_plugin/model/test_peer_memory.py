"""Ranks have memory of each other all together or not at all, give it back, and trust it after a comparison only."""

# ruff: noqa: N802 (names of the CUDA runtime)
from __future__ import annotations

import gc
from ctypes import c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_kernels import tiling
from deepinfer_kernels.peer_exchange import PeerMemory
from deepinfer_plugin.errors import EngineError
from deepinfer_plugin.model import peer_memory

pytestmark = pytest.mark.usefixtures("vllm_variables")

OWN, OTHER = 4096, 8192


class Library:
    """Stands in for the CUDA runtime of rank 0."""

    freed: list[int | None]
    fails_to_open = False

    def cudaMalloc(self, size: int) -> c_void_p:
        assert size > 0
        return c_void_p(OWN)

    def cudaMemset(self, address: c_void_p, value: int, size: int) -> None:
        assert (address.value, value) == (OWN, 0)

    def cudaIpcGetMemHandle(self, address: c_void_p) -> Any:
        from vllm.distributed.device_communicators.cuda_wrapper import cudaIpcMemHandle_t

        assert address.value == OWN
        return cudaIpcMemHandle_t()

    def cudaIpcOpenMemHandle(self, handle: Any) -> c_void_p:
        if self.fails_to_open:
            raise RuntimeError("CUDART error: invalid resource handle")
        return c_void_p(OTHER)

    def cudaGetLastError(self) -> int:
        return 0

    def cudaFree(self, address: c_void_p) -> None:
        self.freed.append(address.value)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of two; ``why_not`` is what rank 1 says of its own attempt, ``reachable`` what it can reach."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cuda_wrapper

    other = SimpleNamespace(why_not="", reachable=frozenset({"A", "B"}), asked=0)

    def tell(coordinator: Any, told: Any) -> list[Any]:
        other.asked += 1
        mine = replace(told, device="B", reachable=other.reachable, why_not=other.why_not)
        return [told, mine]

    monkeypatch.setattr(Library, "freed", [], raising=False)
    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", Library)
    monkeypatch.setattr(peer_memory, "_tell", tell)
    monkeypatch.setattr(peer_memory, "_devices_within_reach", lambda device: ["A", "B"])
    monkeypatch.setattr(parallel_state, "in_the_same_node_as", lambda group, rank: [True, True])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    other.coordinator = SimpleNamespace(world_size=2, rank_in_group=0, device=torch.device("cpu"), cpu_group=None)
    return other


def test_ranks_that_reach_each_other_share_memory_and_give_it_back(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "_prove", lambda ranks, device: None)
    peers = peer_memory.peer_memory_of(two_ranks.coordinator, None)  # type: ignore[arg-type]
    assert peers is not None
    assert (peers.addresses.tolist(), peers.epochs.tolist()) == ([OWN, OTHER], [0] * tiling.PEER_PROGRAMS)
    assert Library.freed == []
    del peers
    gc.collect()
    assert Library.freed == [OWN]


def test_a_rank_out_of_reach_leaves_all_without(two_ranks: Any) -> None:
    two_ranks.reachable = frozenset({"B"})
    assert peer_memory.peer_memory_of(two_ranks.coordinator, None) is None  # type: ignore[arg-type]
    assert (two_ranks.asked, Library.freed) == (1, [])


@pytest.mark.parametrize("who", ["this", "other"])
def test_memory_that_one_rank_cannot_map_leaves_all_without(
    who: str, two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "fails_to_open", who == "this")
    two_ranks.why_not = "" if who == "this" else "not permitted"
    assert peer_memory.peer_memory_of(two_ranks.coordinator, None) is None  # type: ignore[arg-type]
    assert (two_ranks.asked, Library.freed) == (3, [OWN]), "every rank hears of the failure, and gives its memory back"


@pytest.mark.parametrize("broken", [None, "gather_columns", "merge_rows"])
def test_other_bytes_than_the_communicator_end_the_start(broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(name: str) -> Any:
        return lambda ranks, x, *owner, **options: x + int(ranks.peers is not None and name == broken)

    for name in ("gather_columns", "merge_rows"):
        monkeypatch.setattr(Ranks, name, exchange(name))
    empty = torch.zeros(0, dtype=torch.int64)
    peers = PeerMemory(rank=1, size=2, addresses=empty, epochs=empty.int(), half_bytes=1 << 20)
    ranks = Ranks(rank=1, size=2, peers=peers)
    if broken is None:
        peer_memory._prove(ranks, torch.device("cpu"))
        return
    with pytest.raises(EngineError, match="rank 1 of 2 on cpu has other bytes than NCCL"):
        peer_memory._prove(ranks, torch.device("cpu"))
