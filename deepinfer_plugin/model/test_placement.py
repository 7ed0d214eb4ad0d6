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
from deepinfer_plugin.model.placement import ExpertLoad, Placement

TOPK = torch.tensor([[0, 3], [1, 3], [0, 2], [2, 3]], dtype=torch.int32)


def test_rows_take_the_replicas_of_an_expert_in_turn() -> None:
    placement = Placement(4, 6)
    assert placement.slots(TOPK).tolist() == [[0, 3], [5, 3], [0, 2], [2, 3]]
    addresses = [placement._slots.data_ptr(), placement._counts.data_ptr()]
    placement.set((3, 3, 3, 2, 1, 0))
    assert placement.slots(TOPK).tolist() == [[5, 0], [4, 1], [5, 3], [3, 0]]
    assert [placement._slots.data_ptr(), placement._counts.data_ptr()] == addresses, "a captured graph reads the old"


def test_rows_that_fill_up_a_graph_and_rows_beyond_the_step_are_not_counted() -> None:
    load = ExpertLoad.empty(2, 4, max_num_rows=3, top_k=2)
    load.begin(2)
    load.add(1, TOPK.long())
    assert load.counts.tolist() == [[0, 0, 0, 0], [1, 1, 0, 2]]
    load.add(1, TOPK[:1].long())
    assert load.counts.tolist() == [[0, 0, 0, 0], [2, 1, 0, 3]]
    load.begin(3)
    assert not load.counts.any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Ranks):
    """Ranks that all hold the same, and note what they exchange."""

    gathered: list[tuple[int, ...]] = field(default_factory=list)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered.append(tuple(x.shape))
        return torch.stack([x] * self.size)


def test_one_rank_of_each_replica_sends_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([4, 6]))
    monkeypatch.setattr(expert_exchange, "get_forward_context", lambda: SimpleNamespace(dp_metadata=lengths))
    experts, replicas = Recorded(rank=3, size=4), Recorded(rank=1, size=2)
    parallel = Parallel(tensor=Ranks(rank=1, size=2), experts=experts, replicas=replicas)
    context: Any = SimpleNamespace(
        parallel=parallel, load=None, expert_counts=lambda layer: (4, 2), is_backbone=lambda layer: True
    )
    x = torch.arange(32.0).view(4, 8)
    sent = ExpertExchange(context, 0).send(x, TOPK, torch.ones(4, 2))
    assert sorted(replicas.gathered) == [(6, 2), (6, 2), (6, 8)]
    assert experts.gathered == [], "the ranks of a replica hold the same rows, and sent them all"
    assert_bitwise_equal(sent.x, torch.cat([x, torch.zeros(2, 8)] * 2), label="rows")
    here = torch.where(TOPK == 3, 0, -1)
    assert torch.equal(sent.topk_idx, torch.cat([here, torch.full((2, 2), -1)] * 2))
