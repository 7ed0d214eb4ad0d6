"""Places of experts against plain Python: who gets a row, which replica, and what is counted."""

import re

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.expert_places import expert_places
from deepinfer_kernels.expert_places.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal, run_interpreted

NUM_EXPERTS, NUM_SLOTS, TOP_K, RANKS = 9, 15, 3, 3
PER_RANK = NUM_SLOTS // RANKS
BLOCK_ROWS = tiling.PLACES_BLOCK // TOP_K
SIZES = (0, 1, 7, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS)
Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(num_rows: int, device: str) -> Inputs:
    return make_inputs(num_rows, TOP_K, NUM_EXPERTS, NUM_SLOTS, torch.Generator().manual_seed(7), device)


def require_places(got: Places, slots: list[list[int]], rank: int) -> None:
    here = [[s - rank * PER_RANK if s >= 0 and s // PER_RANK == rank else -1 for s in row] for row in slots]
    owner = [[s // PER_RANK if s >= 0 else -1 for s in row] for row in slots]
    for tensor, want, label in zip(got, (slots, here, owner), ("slots", "here", "owner"), strict=True):
        wanted = torch.tensor(want, dtype=torch.int32).view(len(slots), TOP_K)
        assert_bitwise_equal(tensor.cpu(), wanted, label=label)


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_rows_take_the_replicas_of_an_expert_in_turn(num_rows: int, rank: int, device: str) -> None:
    topk_idx, table, num_replicas, _ = inputs(num_rows, device)
    got = expert_places(topk_idx, slots_per_rank=PER_RANK, rank=rank, table=table, num_replicas=num_replicas)
    entries, numbers = table.tolist(), num_replicas.tolist()
    assert max(numbers) > 1, "no expert has replicas"
    slots = [[entries[e][row % numbers[e]] for e in experts] for row, experts in enumerate(topk_idx.tolist())]
    require_places(got, slots, rank)


@pytest.mark.parametrize("num_rows", SIZES)
def test_without_a_table_an_expert_is_in_the_slot_of_its_id(num_rows: int, device: str) -> None:
    topk_idx = inputs(num_rows, device)[0]
    require_places(expert_places(topk_idx, slots_per_rank=PER_RANK, rank=1), topk_idx.tolist(), 1)


@pytest.mark.parametrize("has_table", [False, True])
def test_no_expert_has_no_place_and_no_owner_and_does_not_count(has_table: bool, device: str) -> None:
    topk_idx, table, num_replicas, _ = inputs(5, device)
    topk_idx[3:] = -1
    options = {"table": table, "num_replicas": num_replicas} if has_table else {}
    counts = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)
    is_real = torch.ones(5, TOP_K, dtype=torch.int32, device=device)
    got = expert_places(topk_idx, slots_per_rank=PER_RANK, rank=0, is_real=is_real, counts=counts, **options)
    for tensor in got:
        assert tensor[3:].tolist() == [[-1] * TOP_K] * 2
    assert int(counts.sum()) == 3 * TOP_K


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("spare_rows", [-3, 0, 5])
def test_real_rows_are_added_to_the_counts_and_rows_beyond_are_not(
    num_rows: int, spare_rows: int, has_table: bool, device: str
) -> None:
    topk_idx, table, num_replicas, is_real = inputs(num_rows, device)
    options = {"table": table, "num_replicas": num_replicas} if has_table else {}
    wide = torch.ones(max(num_rows + spare_rows, 0), TOP_K, dtype=torch.int32, device=device)
    wide[:num_rows] = is_real[: len(wide)]
    before = torch.arange(2 * NUM_SLOTS, dtype=torch.int32, device=device).view(2, NUM_SLOTS)
    counts = before.clone()
    slots, _, _ = expert_places(topk_idx, slots_per_rank=PER_RANK, rank=2, is_real=wide, counts=counts[1], **options)
    want = before.tolist()
    for row, real in zip(slots.tolist(), wide.tolist(), strict=False):
        for slot, adds in zip(row, real, strict=True):
            want[1][slot] += adds
    assert counts.tolist() == want
    assert num_rows < 7 or counts.tolist() != before.tolist()


@pytest.mark.parametrize("has_table", [False, True])
def test_strided_arguments_give_the_same_places(has_table: bool, device: str) -> None:
    topk_idx, table, num_replicas, is_real = inputs(20, device)

    def run(*tensors: torch.Tensor, counts: torch.Tensor) -> Places:
        ids, slots, numbers, real = tensors
        options = {"table": slots, "num_replicas": numbers} if has_table else {}
        return expert_places(ids, slots_per_rank=PER_RANK, rank=1, is_real=real, counts=counts, **options)

    def strided(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat_interleave(2, dim=-1)
        wide[..., 1::2] = 77
        return wide[..., ::2]

    counts = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)
    columns = torch.zeros(NUM_SLOTS, 2, dtype=torch.int32, device=device)
    want = run(topk_idx, table, num_replicas, is_real, counts=counts)
    got = run(*map(strided, (topk_idx, table, num_replicas, is_real)), counts=columns[:, 1])
    for tensor, wanted, label in zip(got, want, ("slots", "here", "owner"), strict=True):
        assert_bitwise_equal(tensor, wanted, label=label)
    assert columns[:, 1].tolist() == counts.tolist()
    assert not columns[:, 0].any()


def test_the_kernel_gives_the_integers_of_the_reference() -> None:
    assert run_interpreted("expert_places.interpreted_places").strip() == "launches 24"


def test_errors_name_operation_argument_and_rule() -> None:
    topk_idx, table, num_replicas, is_real = inputs(4, "cpu")
    counts = torch.zeros(NUM_SLOTS, dtype=torch.int32)

    def run(ids: torch.Tensor = topk_idx, **options: torch.Tensor) -> Places:
        return expert_places(ids, slots_per_rank=PER_RANK, rank=0, **options)

    with pytest.raises(ShapeError, match=re.escape("expert_places: slots_per_rank is 0 and rank is 0, expected")):
        expert_places(topk_idx, slots_per_rank=0, rank=0)
    with pytest.raises(ShapeError, match=re.escape("expert_places: topk_idx is [4], expected 2 axes")):
        run(topk_idx[:, 0])
    with pytest.raises(UnsupportedError, match=re.escape("expert_places: topk_idx is torch.int64, expected")):
        run(topk_idx.long())
    with pytest.raises(UnsupportedError, match=re.escape("expert_places: num_replicas is None, expected table and")):
        run(table=table)
    with pytest.raises(UnsupportedError, match=re.escape("expert_places: is_real is None, expected is_real and")):
        run(counts=counts)
    with pytest.raises(ShapeError, match=re.escape("expert_places: num_replicas is [8], expected [9]")):
        run(table=table, num_replicas=num_replicas[1:])
    with pytest.raises(UnsupportedError, match=re.escape("expert_places: table is torch.int64, expected torch.int32")):
        run(table=table.long(), num_replicas=num_replicas)
    with pytest.raises(ShapeError, match=re.escape("expert_places: is_real is [4, 2], expected [4, 3]")):
        run(is_real=is_real[:, 1:], counts=counts)
    with pytest.raises(ShapeError, match=re.escape("expert_places: counts is [1, 15], expected 1 axes")):
        run(is_real=is_real, counts=counts[None])
    with pytest.raises(UnsupportedError, match=re.escape("expert_places: counts is torch.int64, expected torch.int32")):
        run(is_real=is_real, counts=counts.long())
