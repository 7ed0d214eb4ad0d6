"""Memory that the ranks of one host map of each other, so that a kernel exchanges rows instead of NCCL.

It is memory of the CUDA runtime, handed over as vLLM's own custom all-reduce does it. Where a rank cannot reach another
one's memory (another host, another container, no link) all of them go without, and exchanges take the process group.
"""

import weakref
from ctypes import c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from vllm.logger import init_logger

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_kernels import peer_exchange, tiling
from deepinfer_kernels.peer_exchange import PeerMemory
from deepinfer_plugin.errors import EngineError

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)

MAX_RANKS = 8
HALF_BYTES = 64 << 20
"""Largest result of one launch: fp32 logits of 128 rows of the released vocabulary. The memory has two halves."""
PROOF_SHAPE = (37, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a rank tells the others: its device, those it can reach, and the handle of its memory, if it got any."""

    device: str
    reachable: frozenset[str]
    handle: bytes | None = None
    why_not: str = ""


def peer_memory_of(coordinator: "GroupCoordinator", group: distributed.ProcessGroup) -> PeerMemory | None:
    """Memory of a group's ranks, proven by an exchange, or None where they cannot all reach each other.

    Every rank of the group must call it.

    Args:
        coordinator: the group.
        group: its communicator, which the proof compares with.

    Raises:
        EngineError: an exchange over the memory gives other bytes than the communicator.
    """
    from vllm.distributed.parallel_state import in_the_same_node_as

    size = coordinator.world_size
    if size > MAX_RANKS or not all(in_the_same_node_as(coordinator.cpu_group, 0)):
        return None
    allocation = _Allocation(coordinator, peer_exchange.memory_bytes(size, HALF_BYTES))
    if allocation.addresses is None:
        return None
    device = coordinator.device
    peers = PeerMemory(
        rank=coordinator.rank_in_group,
        size=size,
        addresses=torch.tensor(allocation.addresses, dtype=torch.int64, device=device),
        epochs=torch.zeros(tiling.PEER_PROGRAMS, dtype=torch.int32, device=device),
        half_bytes=HALF_BYTES,
    )
    # Not when the process ends: that frees it, and CUDA would wait there for an exchange whose other rank is gone.
    weakref.finalize(peers, allocation.free).atexit = False  # type: ignore[misc]
    _prove(Ranks(rank=peers.rank, size=size, group=group, peers=peers), device)
    return peers


class _Allocation:
    """This rank's memory and where it sees that of the others; ``addresses`` is None where one is out of reach."""

    def __init__(self, coordinator: "GroupCoordinator", num_bytes: int) -> None:
        from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

        self.addresses: list[int] | None = None
        self._library, self._own = CudaRTLibrary(), c_void_p()
        devices = _devices_within_reach(coordinator.device)
        told = _Told(device=devices[0], reachable=frozenset(devices))
        all_told = _tell(coordinator, told)
        if any(one.device not in other.reachable for one in all_told for other in all_told):
            logger.info_once("GPUs of the group cannot map each other's memory: exchanges go through NCCL")
            return
        handle, why_not = self._allocate(num_bytes, coordinator.device)
        all_told = _tell(coordinator, replace(told, handle=handle, why_not=why_not))
        addresses = None
        if all(one.handle is not None for one in all_told):
            addresses, why_not = self._map(all_told, coordinator.rank_in_group)
            all_told = _tell(coordinator, replace(told, why_not=why_not))
        if reasons := {one.why_not for one in all_told} - {""}:
            logger.warning_once("Memory of the GPUs cannot be mapped (%s): exchanges go through NCCL", max(reasons))
            self.free()
            return
        self.addresses = addresses

    def _allocate(self, num_bytes: int, device: torch.device) -> tuple[bytes | None, str]:
        """The handle of this rank's memory, or why there is none."""
        try:
            self._own = self._library.cudaMalloc(num_bytes)
            self._library.cudaMemset(self._own, 0, num_bytes)
            torch.cuda.synchronize(device)
            return bytes(self._library.cudaIpcGetMemHandle(self._own)), ""
        except RuntimeError as error:
            self._library.cudaGetLastError()
            return None, str(error)

    def _map(self, all_told: list[_Told], rank: int) -> tuple[list[int], str]:
        """Where the memory of every rank is, and why that of one cannot be reached."""
        from vllm.distributed.device_communicators.cuda_wrapper import cudaIpcMemHandle_t

        addresses = []
        for other, one in enumerate(all_told):
            if other == rank:
                addresses.append(int(self._own.value or 0))
                continue
            assert one.handle is not None, "every rank has allocated"
            try:
                opened = self._library.cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(one.handle))
            except RuntimeError as error:
                self._library.cudaGetLastError()
                return addresses, str(error)
            addresses.append(int(opened.value or 0))
        return addresses, ""

    def free(self) -> None:
        """Give this rank's memory back; the process ends with the mappings of the others."""
        if self._own.value is not None:
            self._library.cudaFree(self._own)
            self._own = c_void_p()


def _devices_within_reach(device: torch.device) -> list[str]:
    """UUID of a GPU, then of those that it can reach."""
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own and torch.cuda.can_device_access_peer(own, i)]
    return [str(torch.cuda.get_device_properties(i).uuid) for i in (own, *others)]


def _tell(coordinator: "GroupCoordinator", told: _Told) -> list[_Told]:
    all_told: list[Any] = [None] * coordinator.world_size
    distributed.all_gather_object(all_told, told, group=coordinator.cpu_group)
    return all_told


def _prove(ranks: Ranks, device: torch.device) -> None:
    """Exchange rows over the memory and over the group: the start ends where they are not the same bytes."""
    generator = torch.Generator(device=device).manual_seed(ranks.rank)
    x = torch.randint(-(1 << 31), 1 << 31, PROOF_SHAPE, dtype=torch.int64, device=device, generator=generator).int()
    owner = (torch.arange(PROOF_SHAPE[0], device=device) % ranks.size).int()
    slow = Ranks(rank=ranks.rank, size=ranks.size, group=ranks.group)
    for _ in range(3):  # both halves, and one again
        pairs = [
            (ranks.gather_columns(x), slow.gather_columns(x)),
            (ranks.merge_rows(x, owner, is_cut=True), slow.merge_rows(x, owner, is_cut=True)),
        ]
        if not all(torch.equal(got, want) for got, want in pairs):
            raise EngineError(
                f"peer memory: rank {ranks.rank} of {ranks.size} on {device} has other bytes than NCCL behind an "
                "exchange, expected equal ones; check the link between the GPUs (nvidia-smi topo -m, dmesg)"
            )
