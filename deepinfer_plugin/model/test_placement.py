"""Slots of experts, counts of their rows, and which ranks the rows of replicas come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.model import expert_exchange
from deepinfer_plugin.model.expert_exchange import ExpertExchange
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.placement import ExpertLoad

TOPK = torch.tensor([[0, 3], [1, 3], [0, 2], [2, 3]], dtype=torch.int32)
# Of four experts in six slots, first [0, 1, 2, 3, 0, 1], then [3, 3, 3, 2, 1, 0].
SLOTS = [[0, 3], [5, 3], [0, 2], [2, 3]]
MOVED_SLOTS = [[5, 0], [4, 1], [5, 3], [3, 0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Ranks):
    """Ranks that all hold the same, and note what they exchange."""

    gathered: list[tuple[int, ...]] = field(default_factory=list)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered.append(tuple(x.shape))
        return torch.stack([x] * self.size)


def exchange(parallel: Parallel, *, num_experts: int = 4, load: ExpertLoad | None = None) -> ExpertExchange:
    """Of layer 1."""
    context: Any = SimpleNamespace(
        parallel=parallel, load=load, expert_counts=lambda layer: (num_experts, 2), is_backbone=lambda layer: True
    )
    return ExpertExchange(context, 1)


def of_rank(rank: int, **changed: Any) -> Parallel:
    """One of two ranks with the same rows."""
    return Parallel(experts=Ranks(rank=rank, size=2), tensor=Ranks(rank=rank, size=2), **changed)


def test_rows_take_the_replicas_of_an_expert_in_turn() -> None:
    options: Any = "some"
    found = [exchange(of_rank(rank, balancing=options, num_extra_experts=2)) for rank in (0, 1)]
    for tried, (slots, moved) in enumerate(((SLOTS, None), (MOVED_SLOTS, (3, 3, 3, 2, 1, 0)))):
        for rank, one in enumerate(found):
            placement = one.placement
            assert placement is not None
            addresses = [placement.table.data_ptr(), placement.num_replicas.data_ptr()]
            if moved is not None:
                placement.set(moved)
            sent = one.send(torch.zeros(4, 8), TOPK, torch.ones(4, 2))
            here = [[slot - 3 * rank if slot // 3 == rank else -1 for slot in row] for row in slots]
            assert sent.topk_idx.tolist() == here, tried
            assert sent.owner.tolist() == [[slot // 3 for slot in row] for row in slots]
            now = [placement.table.data_ptr(), placement.num_replicas.data_ptr()]
            assert now == addresses, "a captured graph reads the old"


def test_rows_that_fill_up_a_graph_and_rows_beyond_the_step_are_not_counted() -> None:
    load = ExpertLoad.empty(2, 4, max_num_rows=3, top_k=2)
    one = exchange(of_rank(0), load=load)

    def send(topk_idx: torch.Tensor) -> list[list[int]]:
        one.send(torch.zeros(len(topk_idx), 8), topk_idx, torch.ones(len(topk_idx), 2))
        counts: list[list[int]] = load.counts.tolist()
        return counts

    load.begin(2)
    assert send(TOPK) == [[0, 0, 0, 0], [1, 1, 0, 2]]
    assert send(TOPK[:1]) == [[0, 0, 0, 0], [2, 1, 0, 3]]
    load.begin(3)
    assert not load.counts.any()
    assert send(TOPK) == [[0, 0, 0, 0], [2, 1, 1, 2]]


def test_one_rank_of_each_replica_sends_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([4, 6]))
    monkeypatch.setattr(expert_exchange, "get_forward_context", lambda: SimpleNamespace(dp_metadata=lengths))
    experts, replicas = Recorded(rank=3, size=4), Recorded(rank=1, size=2)
    parallel = Parallel(tensor=Ranks(rank=1, size=2), experts=experts, replicas=replicas)
    x = torch.arange(32.0).view(4, 8)
    sent = exchange(parallel).send(x, TOPK, torch.ones(4, 2))
    assert sorted(replicas.gathered) == [(6, 2), (6, 2), (6, 8)]
    assert experts.gathered == [], "the ranks of a replica hold the same rows, and sent them all"
    assert_bitwise_equal(sent.x, torch.cat([x, torch.zeros(2, 8)] * 2), label="rows")
    here = torch.where(TOPK == 3, 0, -1)
    assert torch.equal(sent.topk_idx, torch.cat([here, torch.full((2, 2), -1)] * 2))
    assert torch.equal(sent.owner, TOPK), "one expert on a rank"
