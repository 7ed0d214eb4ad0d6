"""What counts, when experts move, and that weights go before the maps that name their new places."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_plugin.eplb.options import EplbOptions
from deepinfer_plugin.metrics import MOE_LB_STEPS
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.placement import ExpertLoad, Placement

pytestmark = pytest.mark.usefixtures("vllm_variables")
OPTIONS = EplbOptions(
    policy="rotate",
    window_size=2,
    step_interval=4,
    num_extra_experts=0,
    counts_prefill=False,
    communicator="torch_nccl",
    is_async=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Both(Ranks):
    """Two ranks; the other one holds what this one holds, in another order of slots if it is a replica."""

    is_mirrored: bool = False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x.flip(-1) if self.is_mirrored else x])


def two_ranks(**changed: Any) -> Parallel:
    group: Any = "a group"
    return Parallel(**{"experts": Both(size=2, group=group), "balancing": OPTIONS, **changed})


def load(counts: list[int]) -> ExpertLoad:
    return ExpertLoad(counts=torch.tensor([counts], dtype=torch.int32), is_real=torch.zeros(1, 1, dtype=torch.int32))


def test_the_figure_is_of_all_ranks_and_replicas() -> None:
    from deepinfer_plugin.eplb.balancer import LoadRecorder

    for replicas, ratio in ((Ranks(), 2.0), (Both(size=2, is_mirrored=True), 1.0)):
        recorder = LoadRecorder(load([3, 1, 0, 0]), two_ranks(replicas=replicas))
        for _ in range(MOE_LB_STEPS):
            assert recorder.balance.ratio is None
            recorder.record()
        assert recorder.balance.ratio == ratio


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of one layer with four experts; its transfers are noted together with the maps in force at their time."""
    from deepinfer_plugin.eplb import balancer

    placement = Placement(4, 4)
    mixture = SimpleNamespace(
        experts=SimpleNamespace(moved=lambda: [torch.zeros(2, 1)]), exchange=SimpleNamespace(placement=placement)
    )
    model: Any = SimpleNamespace(
        load=load([5, 1, 1, 1]),
        parallel=two_ranks(),
        config=SimpleNamespace(n_routed_experts=4),
        blocks=lambda: [SimpleNamespace(ffn=mixture)],
    )
    monkeypatch.setattr(balancer, "get_ep_group", lambda: None)
    monkeypatch.setattr(balancer, "create_eplb_communicator", lambda *given: None)
    found: Any = balancer.ExpertMover(model, OPTIONS)
    found.transfers = []

    def transfer(old: torch.Tensor, new: torch.Tensor, *rest: Any) -> None:
        maps = placement.table[:, 0].tolist()
        found.transfers.append((old[0].tolist(), new[0].tolist(), maps))

    monkeypatch.setattr(balancer, "rearrange_expert_weights_inplace", transfer)
    found.maps = lambda: placement.table[:, 0].tolist()
    return found


def test_weights_go_before_maps_and_the_first_move_comes_after_a_quarter(mover: Any) -> None:
    mover.record(is_dummy=False)
    assert mover.transfers == [([0, 1, 2, 3], [2, 3, 0, 1], [0, 1, 2, 3])]
    assert mover.maps() == [2, 3, 0, 1]
    assert (mover.num_moves, mover.placement.tolist()) == (1, [[2, 3, 0, 1]])
    for _ in range(3):
        mover.record(is_dummy=False)
        assert mover.num_moves == 1
    mover.record(is_dummy=False)
    assert mover.num_moves == 2


def test_counts_follow_the_expert_and_not_its_slot(mover: Any) -> None:
    mover.record(is_dummy=False)  # experts are now [2, 3, 0, 1]
    mover.record(is_dummy=False)
    assert mover.loads().tolist() == [[[1, 1, 5, 1]]]


def test_steps_of_others_and_steps_with_prompts_are_left_out(mover: Any) -> None:
    mover.record(is_dummy=True)
    assert (mover.num_moves, mover.transfers) == (0, []), "nothing was counted, so nothing may move"
    mover._load.has_prompt_rows = True
    mover.record(is_dummy=False)
    mover._load.has_prompt_rows = False
    mover.record(is_dummy=False)
    assert mover.loads().tolist() == [[[0, 0, 0, 0], [5, 1, 1, 1]]]
    mover.record(is_dummy=False)
    assert np.array_equal(mover.loads(), [[[5, 1, 1, 1], [5, 1, 1, 1]]])
