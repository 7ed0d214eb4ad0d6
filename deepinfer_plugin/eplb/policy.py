"""Where experts go: pure functions from counted tokens to a placement. NumPy only.

A placement is [num_layers, num_slots] int64: the expert in each slot; a rank holds an equal run of slots. Slots beyond
the number of experts hold replicas.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]  # [num_layers, num_steps, num_experts] tokens
Placement = NDArray[np.int64]  # [num_layers, num_slots] experts
Policy = Callable[[Loads, Placement, int], Placement]

# What a higher id adds to the gain of a replica: DeepInfer's rule for experts that gain equally.
_TIE_GAIN = 1e-4


def first_placement(num_layers: int, num_experts: int, num_slots: int) -> Placement:
    """Experts in ascending id, then again from the first one on."""
    return np.tile(np.arange(num_slots, dtype=np.int64) % num_experts, (num_layers, 1)).astype(np.int64)


def round_up_extra(num_extra: int, num_experts: int, num_ranks: int) -> int:
    """The smallest number of replicas, ``num_extra`` or more, with which every rank holds equally many experts."""
    return num_extra + -(num_experts + num_extra) % num_ranks


def summed_peak(loads: Loads, old: Placement, num_ranks: int) -> Placement:
    """DeepInfer's policy: the sum over steps of the slowest rank's tokens counts, not the sum of tokens.

    Replicas go, one by one, to the expert with which the sum over steps of the largest count of an expert falls most;
    ``1e-4 * id`` is added to each gain, then the lowest id wins. The replicas are dealt out heaviest first, in a stable
    order, each to the rank with which the sum over steps of the slowest rank's tokens stays lowest; ties go to the
    lowest rank.

    Args:
        loads: [num_layers, num_steps, num_experts] tokens of each expert in each step.
        old: [num_layers, num_slots], the placement in force.
        num_ranks: ranks that hold the slots, equally many each.

    Returns:
        The new placement.
    """
    return _deal_out(loads, _replica_counts(loads, old.shape[1]), num_ranks)


def vllm_default(loads: Loads, old: Placement, num_ranks: int) -> Placement:
    """vLLM's own policy, on the sums over all steps; arguments as for ``summed_peak``."""
    import torch
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    found = DefaultEplbPolicy.rebalance_experts(
        torch.from_numpy(loads.sum(axis=1)), old.shape[1], 1, 1, num_ranks, torch.from_numpy(old)
    )
    return np.asarray(found.numpy(), dtype=np.int64)


def rotate(loads: Loads, old: Placement, num_ranks: int) -> Placement:
    """For tests: what a rank holds goes to the next one; arguments as for ``summed_peak``."""
    del loads
    return np.roll(old, old.shape[1] // num_ranks, axis=1)


def uneven(loads: Loads, old: Placement, num_ranks: int) -> Placement:
    """For tests and measurements: the busiest experts share the first ranks, and the idlest get the replicas.

    Arguments as for ``summed_peak``.
    """
    del num_ranks
    num_extra = old.shape[1] - loads.shape[2]
    busiest_first = np.argsort(-loads.sum(axis=1), axis=1, kind="stable")
    again = busiest_first[:, ::-1][:, np.arange(num_extra) % loads.shape[2]]
    return np.concatenate((busiest_first, again), axis=1).astype(np.int64)


POLICIES: dict[str, Policy] = {
    "summed_peak": summed_peak,
    "vllm": vllm_default,
    "rotate": rotate,
    "uneven": uneven,
}


def keep_slots(new: Placement, old: Placement, num_ranks: int) -> Placement:
    """Give an expert that stays on its rank the slot it has there, so that its weights are not copied.

    Args:
        new: [num_layers, num_slots], which experts each rank shall hold.
        old: the placement in force, of the same shape.
        num_ranks: ranks that hold the slots.

    Returns:
        ``new`` with another order within each rank.
    """
    shape = (new.shape[0] * num_ranks, -1)
    result = new.reshape(shape).copy()
    for wanted, before in zip(result, old.reshape(shape), strict=True):
        rest, is_kept = list(wanted), np.zeros(len(wanted), dtype=bool)
        for slot, expert in enumerate(before):
            if expert in rest:
                rest.remove(expert)
                wanted[slot], is_kept[slot] = expert, True
        wanted[~is_kept] = rest
    return result.reshape(new.shape)


def imbalance(loads: Loads, placement: Placement, num_ranks: int) -> float:
    """The figure ``moe_lb`` that a placement would have had, replicas sharing the tokens of their expert equally.

    Args:
        loads: [num_layers, num_steps, num_experts] tokens.
        placement: [num_layers, num_slots].
        num_ranks: ranks that hold the slots.

    Returns:
        Sum of the slowest rank's tokens over the sum of the mean; 1.0: even, or no tokens.
    """
    slowest = mean = 0.0
    for tokens, slots in zip(loads, placement, strict=True):
        share = tokens / np.bincount(slots, minlength=tokens.shape[1])
        of_ranks = share[:, slots].reshape(len(tokens), num_ranks, -1).sum(axis=2)
        slowest += of_ranks.max(axis=1).sum()
        mean += of_ranks.mean(axis=1).sum()
    return slowest / mean if mean > 0 else 1.0


def _replica_counts(loads: Loads, num_slots: int) -> NDArray[np.int64]:
    """[num_layers, num_experts] replicas of every expert, ``num_slots`` in all."""
    num_layers, _, num_experts = loads.shape
    counts = np.ones((num_layers, num_experts), dtype=np.int64)
    layers = np.arange(num_layers)
    for _ in range(num_slots - num_experts):
        shares = loads / counts[:, None]
        top = shares.argmax(axis=2)  # [num_layers, num_steps], the expert that decides the step
        peak = np.take_along_axis(shares, top[..., None], 2)[..., 0]
        lowered = np.take_along_axis(loads, top[..., None], 2)[..., 0] / (np.take_along_axis(counts, top, 1) + 1)
        np.put_along_axis(shares, top[..., None], 0.0, 2)
        gain = np.zeros((num_layers, num_experts))
        np.add.at(gain, (layers[:, None], top), peak - np.maximum(lowered, shares.max(axis=2)))
        chosen = (gain + _TIE_GAIN * np.arange(num_experts)).argmax(axis=1)
        counts[layers, chosen] += 1
    return counts


def _deal_out(loads: Loads, counts: NDArray[np.int64], num_ranks: int) -> Placement:
    num_layers, num_steps, num_experts = loads.shape
    layers = np.arange(num_layers)
    replicas = np.stack([np.repeat(np.arange(num_experts), of_layer) for of_layer in counts])
    weights = np.take_along_axis(loads.sum(axis=1) / counts, replicas, 1)
    replicas = np.take_along_axis(replicas, np.argsort(-weights, axis=1, kind="stable"), 1)
    num_slots = replicas.shape[1] // num_ranks
    of_ranks = np.zeros((num_layers, num_steps, num_ranks))
    placement = np.zeros((num_layers, num_ranks, num_slots), dtype=np.int64)
    used = np.zeros((num_layers, num_ranks), dtype=np.int64)
    for column in range(replicas.shape[1]):
        experts = replicas[:, column]
        share = loads[layers, :, experts] / counts[layers, experts][:, None]  # [num_layers, num_steps]
        peak = np.maximum(of_ranks.max(axis=2)[..., None], of_ranks + share[..., None]).sum(axis=1)
        rank = np.where(used == num_slots, np.inf, peak).argmin(axis=1)
        of_ranks[layers, :, rank] += share
        placement[layers, rank, used[layers, rank]] = experts
        used[layers, rank] += 1
    return placement.reshape(num_layers, -1)
