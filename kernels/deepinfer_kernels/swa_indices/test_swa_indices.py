import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.swa_indices import entry_slots, window_slots
from deepinfer_kernels.swa_indices.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal

BLOCK_SIZE = 4


def _inputs(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(num_tokens, 3, 9, BLOCK_SIZE, torch.Generator().manual_seed(3), device)


def _want_window(position: int, table: list[int], window: int, floor: int) -> list[int]:
    visible = range(max(0, position - window + 1, floor), position + 1)
    slots = [table[j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE for j in visible]
    return slots + [-1] * (window - len(slots))


@pytest.mark.parametrize("window", [1, 7, 8, 9])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_window_lists_visible_positions_ascending_then_none(num_tokens: int, window: int, device: str) -> None:
    positions, req_idx, block_table = _inputs(num_tokens, device)
    if num_tokens:
        positions[0] = 0
    floor = torch.randint(0, 36, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    floor = torch.minimum(floor, positions)
    got = window_slots(positions, req_idx, block_table, BLOCK_SIZE, window, floor)
    tables = block_table.tolist()
    want = [
        _want_window(p, tables[r], window, f)
        for p, r, f in zip(positions.tolist(), req_idx.tolist(), floor.tolist(), strict=True)
    ]
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int64).view(num_tokens, window), label="window")


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_entries_map_through_the_table_of_their_request(num_tokens: int, device: str) -> None:
    _, req_idx, block_table = _inputs(num_tokens, device)
    indices = torch.randint(-1, 18, (num_tokens, 5), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    got = entry_slots(indices.to(device), req_idx, block_table, 2)
    tables = block_table.tolist()
    want = [
        [-1 if i < 0 else tables[r][i // 2] * 2 + i % 2 for i in row]
        for r, row in zip(req_idx.tolist(), indices.tolist(), strict=True)
    ]
    assert_bitwise_equal(got.cpu(), torch.tensor(want, dtype=torch.int64).view(num_tokens, 5), label="entries")


def test_every_row_is_the_same_alone_and_in_a_batch(device: str) -> None:
    positions, req_idx, block_table = _inputs(33, device)
    floor = torch.zeros_like(positions)
    batch = window_slots(positions, req_idx, block_table, BLOCK_SIZE, 8, floor)
    alone = [
        window_slots(positions[t : t + 1], req_idx[t : t + 1], block_table, BLOCK_SIZE, 8, floor[t : t + 1])
        for t in range(33)
    ]
    assert_bitwise_equal(batch, torch.cat(alone), label="window")


def test_unused_table_entries_and_padded_rows_do_not_matter(device: str) -> None:
    positions = torch.tensor([5, 2, -1, 900], device=device)
    req_idx = torch.tensor([0, 1, 0, -1], dtype=torch.int32, device=device)
    block_table = torch.tensor([[7, 3, -99], [4, -99, -99]], dtype=torch.int32, device=device)
    got = window_slots(positions, req_idx, block_table, BLOCK_SIZE, 8, torch.zeros_like(positions))
    want = [[28, 29, 30, 31, 12, 13, -1, -1], [16, 17, 18, -1, -1, -1, -1, -1], [-1] * 8, [-1] * 8]
    assert got.tolist() == want
    indices = torch.tensor([[0, 7], [3, -1], [-1, -1], [5000, 2]], dtype=torch.int32, device=device)
    assert entry_slots(indices, req_idx, block_table, BLOCK_SIZE).tolist() == [[28, 15], [19, -1], [-1, -1], [-1, -1]]


def test_strided_arguments_give_the_same_slots(device: str) -> None:
    positions, req_idx, block_table = _inputs(20, device)
    floor = torch.zeros_like(positions)
    want = window_slots(positions, req_idx, block_table, BLOCK_SIZE, 8, floor)
    wide_table = torch.full((3, 20), -99, dtype=torch.int32, device=device)
    wide_table[:, ::2][:, :9] = block_table
    pairs = torch.stack([positions, floor], dim=1)
    got = window_slots(pairs[:, 0], req_idx, wide_table[:, ::2][:, :9], BLOCK_SIZE, 8, pairs[:, 1])
    assert_bitwise_equal(got, want, label="strided")


def test_errors_name_operation_argument_and_rule() -> None:
    positions, req_idx, block_table = _inputs(4, "cpu")
    floor = torch.zeros_like(positions)
    with pytest.raises(ShapeError, match="window_slots: window is 0, expected at least 1"):
        window_slots(positions, req_idx, block_table, BLOCK_SIZE, 0, floor)
    with pytest.raises(UnsupportedError, match=r"window_slots: positions is torch.int32, expected torch.int64"):
        window_slots(positions.int(), req_idx, block_table, BLOCK_SIZE, 8, floor)
    with pytest.raises(ShapeError, match=r"window_slots: floor has shape \[3\]"):
        window_slots(positions, req_idx, block_table, BLOCK_SIZE, 8, floor[1:])
    with pytest.raises(ShapeError, match=r"window_slots: req_idx has shape \[3\], expected \[4\]"):
        window_slots(positions, req_idx[1:], block_table, BLOCK_SIZE, 8, floor)
    with pytest.raises(ShapeError, match=r"entry_slots: block_table has shape \[9\]"):
        entry_slots(positions.int()[:, None], req_idx, block_table[0], BLOCK_SIZE)
    with pytest.raises(ShapeError, match=r"entry_slots: indices has shape \[4\]"):
        entry_slots(positions.int(), req_idx, block_table, BLOCK_SIZE)
