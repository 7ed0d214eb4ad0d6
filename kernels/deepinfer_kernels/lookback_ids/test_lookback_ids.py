from itertools import pairwise
from typing import Any

import pytest
import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.lookback_ids import lookback_ids
from deepinfer_kernels.lookback_ids.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal

DEPTH, MAX_LEN = 3, 40
# Rows and first position of each request: prompts from their start, later chunks, decode rows, drafts, the last column.
STEPS = [
    ([1], [0]),
    ([4], [0]),
    ([1, 1, 1, 1], [0, 1, 2, 39]),
    ([5, 1, 3, 2], [0, 17, 36, 1]),
    ([2] * 65 + [1] * 70, [index % 38 for index in range(135)]),  # more than one block of requests and of rows
]


def _step(lengths: list[int], contexts: list[int], device: str, num_padding: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = make_inputs(lengths, contexts, num_padding, MAX_LEN, generator)
    return {name: value.to(device) for name, value in inputs.items()}


def _run(inputs: dict[str, Any], num_rows: int, device: str) -> torch.Tensor:
    out = torch.full((num_rows, DEPTH), -7, dtype=torch.int64, device=device)
    assert lookback_ids(**inputs, out=out) is out
    return out.cpu()


def _want(inputs: dict[str, Any], lengths: list[int], contexts: list[int]) -> list[list[int]]:
    """By lists: the history of each request up to its first row, then the rows of the step."""
    ids, history = inputs["input_ids"].tolist(), inputs["all_token_ids"].tolist()
    want, row = [], 0
    for length, context, slot in zip(lengths, contexts, inputs["idx_mapping"].tolist(), strict=True):
        known = history[slot][:context] + ids[row : row + length]
        want += [
            [known[p - d] if p >= d else -1 for d in range(1, DEPTH + 1)] for p in range(context, context + length)
        ]
        row += length
    return want


@pytest.mark.parametrize(("lengths", "contexts"), STEPS)
def test_predecessors_come_from_the_step_then_from_the_history(
    lengths: list[int], contexts: list[int], device: str
) -> None:
    inputs = _step(lengths, contexts, device)
    got = _run(inputs, sum(lengths), device)
    assert got.tolist() == _want(inputs, lengths, contexts)


@pytest.mark.parametrize("num_padding", [1, 31, 200])
@pytest.mark.parametrize("num_ends", [0, 3])  # of requests that only pad the graph
def test_padding_changes_no_row_and_gives_ids_or_none(num_padding: int, num_ends: int, device: str) -> None:
    lengths, contexts = [1, 2, 1], [9, 0, 38]
    inputs = _step(lengths, contexts, device, num_padding)
    starts = inputs["query_start_loc"]
    inputs["query_start_loc"] = torch.cat((starts, starts[-1:].expand(num_ends)))
    got = _run(inputs, 4 + num_padding, device)
    assert got[:4].tolist() == _want(inputs, lengths, contexts)
    known = {-1, *inputs["input_ids"].tolist(), *inputs["all_token_ids"].flatten().tolist()}
    assert set(got[4:].flatten().tolist()) <= known


def test_positions_beyond_the_history_read_its_last_id(device: str) -> None:
    inputs = _step([1], [0], device)
    for position in (MAX_LEN + DEPTH, 1 << 40):
        inputs["positions"] = torch.tensor([position], device=device)
        last = int(inputs["all_token_ids"][inputs["idx_mapping"][0], -1])
        assert _run(inputs, 1, device).tolist() == [[last] * DEPTH]


def test_every_request_is_the_same_alone_and_in_a_batch(device: str) -> None:
    lengths, contexts = STEPS[-1]
    inputs = _step(lengths, contexts, device)
    got = _run(inputs, sum(lengths), device)
    starts = inputs["query_start_loc"].tolist()
    for index, (first, last) in enumerate(pairwise(starts)):
        alone = {
            "input_ids": inputs["input_ids"][first:last],
            "positions": inputs["positions"][first:last],
            "query_start_loc": torch.tensor([0, last - first], dtype=torch.int32, device=device),
            "idx_mapping": inputs["idx_mapping"][index : index + 1],
            "all_token_ids": inputs["all_token_ids"],
        }
        assert_bitwise_equal(_run(alone, last - first, device), got[first:last], label=f"request {index}")


def test_strided_arguments_give_the_same_ids(device: str) -> None:
    lengths, contexts = STEPS[3]
    inputs = _step(lengths, contexts, device)
    want = _run(inputs, sum(lengths), device)
    strided = {name: value.repeat_interleave(2, dim=-1)[..., ::2] for name, value in inputs.items()}
    wide = torch.full((sum(lengths), 2 * DEPTH), -7, dtype=torch.int64, device=device)
    lookback_ids(**strided, out=wide[:, ::2])
    assert_bitwise_equal(wide[:, ::2].cpu(), want, label="strided")
    assert set(wide[:, 1::2].flatten().tolist()) == {-7}


def test_both_integer_widths_of_ids_and_slots(device: str) -> None:
    inputs = _step([3, 2], [5, 0], device)
    want = _run(inputs, 5, device)
    inputs["input_ids"], inputs["idx_mapping"] = inputs["input_ids"].long(), inputs["idx_mapping"].int()
    assert_bitwise_equal(_run(inputs, 5, device), want, label="other widths")


def test_errors_name_operation_argument_and_rule() -> None:
    inputs = _step([3, 2], [5, 0], "cpu")
    with pytest.raises(ShapeError, match=r"lookback_ids: input_ids is \[5\], expected \[4\]"):
        _run(inputs, 4, "cpu")
    with pytest.raises(UnsupportedError, match=r"lookback_ids: positions is torch\.int32"):
        _run({**inputs, "positions": inputs["positions"].int()}, 5, "cpu")
    with pytest.raises(ShapeError, match=r"lookback_ids: query_start_loc is \[2\] and idx_mapping \[2\]"):
        _run({**inputs, "query_start_loc": inputs["query_start_loc"][:2]}, 5, "cpu")
    with pytest.raises(ShapeError, match=r"lookback_ids: query_start_loc is \[3\] and idx_mapping \[0\]"):
        _run({**inputs, "idx_mapping": inputs["idx_mapping"][:0]}, 5, "cpu")
    with pytest.raises(ShapeError, match=r"lookback_ids: all_token_ids is \[4, 0\]"):
        _run({**inputs, "all_token_ids": inputs["all_token_ids"][:, :0]}, 5, "cpu")
