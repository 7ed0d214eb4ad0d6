"""Communicators of our own for exchanges that only move bytes, beside those that vLLM makes with its pins.

Batch-invariant mode pins how NCCL adds: one channel, one protocol, one algorithm. NCCL reads these variables when it
makes a communicator, and they slow down a gather, which adds nothing, as much as a sum: on two H200s 4096 rows took 3.1
ms with them and 0.4 ms without. So the model's exchanges have communicators that are made without the pins, and every
other one of the process keeps them. The ranks that share a layer have memory of each other beside it (``peer_memory``).
"""

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_plugin import envs
from deepinfer_plugin.model.peer_memory import peer_memory_of

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

_made: "WeakKeyDictionary[GroupCoordinator, Ranks]" = WeakKeyDictionary()


def ranks_of(coordinator: "GroupCoordinator", *, share_layers: bool = False) -> Ranks:
    """A group of vLLM as ours, for exchanges of bytes; alone it needs no process group.

    Every rank of the engine must call it for the same groups in the same order.

    Args:
        coordinator: the group.
        share_layers: whether the ranks exchange something in every layer: they then get memory of each other.

    Raises:
        PinError: a pin is not what the mode needs once the communicator is made.
        EngineError: the memory of the ranks does not do what the communicator does.
    """
    if coordinator.world_size == 1:
        return Ranks()
    ranks = Ranks(rank=coordinator.rank_in_group, size=coordinator.world_size, group=coordinator.device_group)
    if coordinator.device.type != "cuda":  # gloo has no pins
        return ranks
    if coordinator not in _made:
        group = _make_group(coordinator)
        _made[coordinator] = replace(
            ranks, group=group, peers=peer_memory_of(coordinator, group) if share_layers else None
        )
    return _made[coordinator]


def _make_group(coordinator: "GroupCoordinator") -> distributed.ProcessGroup:
    """The same ranks on a communicator without pins. PyTorch makes it with the first exchange, so that happens here."""
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        group: distributed.ProcessGroup = coordinator.make_sibling_device_group("deepinfer exchanges")
        ranks = Ranks(rank=coordinator.rank_in_group, size=coordinator.world_size, group=group)
        first = torch.zeros(ranks.size, 1, dtype=torch.uint8, device=coordinator.device)
        ranks.gather(first)
        ranks.exchange(first)
        if coordinator.device.type == "cuda":
            torch.cuda.synchronize(coordinator.device)
    envs.check_batch_invariant_pins(coordinator.device.type)
    return group
