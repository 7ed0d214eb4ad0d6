"""Memory of the ranks of a host: what one cannot get, all go without. The CUDA runtime is a stand-in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("vllm_variables")

OWN, MAPPED = 1 << 20, 1 << 21
CALLS = ["cudaMalloc", "cudaMemset", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"]
Answer = Callable[[Any], Any]


@dataclass
class Runtime:
    """Notes its calls; the one that is named fails."""

    fails: str = ""
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == self.fails:
                raise RuntimeError(f"CUDART error: {name}")
            found = {"cudaMalloc": c_void_p(OWN), "cudaIpcGetMemHandle": bytes(128)}
            return found.get(name, c_void_p(MAPPED))

        return call


@dataclass
class Host:
    """A rank's view: its runtime, and what it has told the other one, whose answers are ``answer`` of them."""

    runtime: Runtime
    told: list[Any]

    def peers(self) -> Any:
        from deepinfer_plugin.model.peer_memory import peer_memory_of

        coordinator: Any = SimpleNamespace(
            world_size=2, rank_in_group=0, device=torch.device("cpu"), cpu_group="the processes"
        )
        return peer_memory_of(coordinator, None)  # type: ignore[arg-type]


def host(monkeypatch: pytest.MonkeyPatch, *, fails: str = "", answer: Answer = lambda told: told) -> Host:
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cuda_wrapper

    from deepinfer_plugin.model import peer_memory

    found = Host(runtime=Runtime(fails=fails), told=[])

    def tell(coordinator: Any, told: Any) -> list[Any]:
        found.told.append(told)
        return [told, answer(told)]

    monkeypatch.setattr(parallel_state, "in_the_same_node_as", lambda group, source: [True, True])
    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", lambda: found.runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peer_memory, "_devices_within_reach", lambda device: ["GPU-5a"])
    monkeypatch.setattr(peer_memory, "_tell", tell)
    monkeypatch.setattr(peer_memory, "_prove", lambda ranks, device: None)
    return found


def test_memory_is_freed_with_its_last_user_and_not_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = host(monkeypatch)
    peers = one.peers()
    assert peers.addresses.tolist() == [OWN, MAPPED]
    assert one.runtime.calls == CALLS
    (finalizer,) = (other for other in weakref.finalize._registry if other.peek()[0] is peers)  # type: ignore[attr-defined]
    assert not finalizer.atexit, "CUDA waits there for an exchange whose other rank is gone"
    del peers
    gc.collect()
    assert one.runtime.calls == [*CALLS, "cudaFree"]


@pytest.mark.parametrize("fails", CALLS)
def test_what_a_rank_cannot_get_it_tells_the_others_and_goes_without(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(monkeypatch, fails=fails)
    assert one.peers() is None
    assert one.told[-1].why_not == f"CUDART error: {fails}"
    freed = [] if fails == "cudaMalloc" else ["cudaFree"]
    assert one.runtime.calls == [*CALLS[: CALLS.index(fails) + 1], "cudaGetLastError", *freed]


@pytest.mark.parametrize(("has_handle", "num_told"), [(False, 2), (True, 3)])
def test_what_another_rank_cannot_get_this_one_goes_without(
    has_handle: bool, num_told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(told: Any) -> Any:
        if not has_handle:  # it cannot allocate
            return replace(told, handle=None, why_not="no memory" if told.handle else "")
        return replace(told, why_not="" if told.handle else "not mapped")

    one = host(monkeypatch, answer=answer)
    assert one.peers() is None
    assert len(one.told) == num_told, "the ranks would wait for each other"
    assert one.runtime.calls[-1] == "cudaFree"


def test_where_a_gpu_is_out_of_reach_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    one = host(monkeypatch, answer=lambda told: replace(told, device="GPU-77"))
    assert one.peers() is None
    assert one.runtime.calls == []


@pytest.mark.parametrize("broken", [None, "gather_columns", "merge_rows"])
def test_other_bytes_than_the_communicator_end_the_start(broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_batch_invariant.collectives import Ranks
    from deepinfer_kernels.peer_exchange import PeerMemory
    from deepinfer_plugin.errors import EngineError
    from deepinfer_plugin.model import peer_memory

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
