"""Policies by hand, against a slow reading of the rule, and what every placement keeps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from deepinfer_plugin.eplb import policy
from deepinfer_plugin.eplb.policy import Loads, Placement


def random_loads(seed: int, num_layers: int = 3, num_steps: int = 5, num_experts: int = 8) -> Loads:
    generator = np.random.default_rng(seed)
    busy = generator.exponential(size=(num_layers, 1, num_experts)) * 20
    return generator.poisson(busy, size=(num_layers, num_steps, num_experts)).astype(np.float64)


def slow_summed_peak(steps: list[list[float]], num_slots: int, num_ranks: int) -> list[list[int]]:
    """The rule for one layer, spelled out: experts of every rank in the order in which they were placed."""
    num_experts = len(steps[0])
    counts = [1] * num_experts

    def peak_with(one_more: int | None) -> float:
        shares = [counts[e] + (e == one_more) for e in range(num_experts)]
        return sum(max(tokens[e] / shares[e] for e in range(num_experts)) for tokens in steps)

    for _ in range(num_slots - num_experts):
        now = peak_with(None)
        scores = [now - peak_with(e) + 1e-4 * e for e in range(num_experts)]
        counts[scores.index(max(scores))] += 1
    weight = [sum(tokens[e] for tokens in steps) / counts[e] for e in range(num_experts)]
    order = sorted((e for e in range(num_experts) for _ in range(counts[e])), key=lambda e: -weight[e])
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in order:
        peaks = {}
        for rank in range(num_ranks):
            if len(ranks[rank]) < num_slots // num_ranks:
                tried = [held + [expert] * (rank == other) for other, held in enumerate(ranks)]
                peaks[rank] = sum(max(sum(t[e] / counts[e] for e in held) for held in tried) for t in steps)
        ranks[min(peaks, key=lambda rank: (peaks[rank], rank))].append(expert)
    return ranks


def test_experts_that_are_busy_in_other_steps_share_a_rank() -> None:
    loads = np.array([[[8.0, 0, 1, 1], [0, 8, 1, 1]]])
    old = policy.first_placement(1, 4, 4)
    assert policy.summed_peak(loads, old, 2).tolist() == [[0, 1, 2, 3]]  # 8 + 8; apart they would make 9 + 9
    assert sorted(policy.vllm_default(loads, old, 2)[0][:2].tolist()) != [0, 1]  # vLLM's sees the sums, 8 and 8


def test_a_replica_goes_to_the_expert_that_lowers_the_peaks_most() -> None:
    loads = np.array([[[10.0, 6, 1, 1]]])
    found = policy.summed_peak(loads, policy.first_placement(1, 4, 6), 2)
    assert Counter(found[0].tolist()) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_equal_gains_go_to_the_higher_id() -> None:
    loads = np.array([[[2.0, 2, 0, 0]]])  # a replica of either leaves the peak where it is
    found = policy.summed_peak(loads, policy.first_placement(1, 4, 5), 1)
    assert Counter(found[0].tolist())[3] == 2


@pytest.mark.parametrize(("num_slots", "num_ranks"), [(8, 2), (10, 2), (12, 4), (16, 8)])
def test_the_policy_is_the_rule_spelled_out(num_slots: int, num_ranks: int) -> None:
    for seed in range(10):
        loads = random_loads(seed)  # counts of tokens: small integers, whose halves and thirds order alike in both
        found = policy.summed_peak(loads, policy.first_placement(3, 8, num_slots), num_ranks)
        for steps, of_layer in zip(loads, found, strict=True):
            want = slow_summed_peak(steps.tolist(), num_slots, num_ranks)
            assert policy.imbalance(steps[None], of_layer[None], num_ranks) == pytest.approx(
                policy.imbalance(steps[None], np.array(want).reshape(1, -1), num_ranks)
            )
            assert of_layer.reshape(num_ranks, -1).tolist() == want, f"seed {seed}"


@pytest.mark.parametrize("name", policy.POLICIES)
def test_every_placement_holds_every_expert_and_moves_no_slot_away(name: str) -> None:
    old = policy.first_placement(3, 8, 10)
    for seed in range(3):
        loads = random_loads(seed)
        new = policy.keep_slots(policy.POLICIES[name](loads, old, 2), old, 2)
        assert new.shape == old.shape
        assert all(set(of_layer) == set(range(8)) for of_layer in new.tolist())
        old = new


def test_rotation_moves_every_expert_and_the_uneven_placement_is_worse() -> None:
    loads, old = random_loads(0), policy.first_placement(3, 8, 8)
    assert not (policy.rotate(loads, old, 2) == old).any()
    even, uneven = (policy.imbalance(loads, choose(loads, old, 2), 2) for choose in (policy.summed_peak, policy.uneven))
    assert 1.0 <= even < policy.imbalance(loads, old, 2) < uneven


def test_an_expert_that_stays_on_its_rank_keeps_its_slot() -> None:
    old: Placement = np.array([[0, 1, 2, 3, 4, 5]])
    new: Placement = np.array([[2, 5, 0, 4, 3, 1]])
    assert policy.keep_slots(new, old, 2).tolist() == [[0, 5, 2, 3, 4, 1]]


def test_the_figure_is_the_slowest_rank_over_the_mean() -> None:
    loads = np.array([[[4.0, 0, 2, 2]]])
    assert policy.imbalance(loads, np.array([[0, 2, 1, 3]]), 2) == 6 / 4
    assert policy.imbalance(loads, np.array([[0, 0, 1, 0, 2, 3]]), 2) == pytest.approx((8 / 3) / 4 * 2)
    assert policy.imbalance(np.zeros((1, 1, 4)), np.array([[0, 1, 2, 3]]), 2) == 1.0


@pytest.mark.parametrize(
    ("lower", "num_experts", "num_ranks", "found"), [(0, 8, 2, 0), (1, 8, 2, 2), (0, 9, 2, 1), (3, 256, 8, 8)]
)
def test_replicas_are_rounded_up_to_what_the_ranks_divide(
    lower: int, num_experts: int, num_ranks: int, found: int
) -> None:
    assert policy.round_up_extra(lower, num_experts, num_ranks) == found
