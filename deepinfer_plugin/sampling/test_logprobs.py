"""Scores of rows: values, order among ties, and independence of what other rows ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_kernels.log_softmax import log_softmax
from deepinfer_kernels.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("vllm_variables")

VOCABULARY = 90
NEVER = float("-inf")


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Logits on a coarse grid, so that many are equal."""
    return torch.randint(-6, 7, (count, VOCABULARY), generator=torch.Generator().manual_seed(seed)) / 4


def score(logits: torch.Tensor, tokens: list[int], num_top: int, **options: Any) -> Any:
    from deepinfer_plugin.sampling.logprobs import score_rows

    return score_rows(logits, torch.tensor(tokens), num_top, **{"is_logits": False, **options})


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCABULARY])
def test_columns_are_the_token_then_the_best_ones(num_top: int) -> None:
    logits = rows(4)
    got = score(logits, [3, 0, 89, 40], num_top)
    values = log_softmax(logits)
    for row, token in enumerate([3, 0, 89, 40]):
        order = sorted(range(VOCABULARY), key=lambda t, r=row: (-float(logits[r, t]), t))  # type: ignore[misc]
        want = [token, *order[:num_top]]
        assert got.logprob_token_ids[row].tolist() == want
        assert_bitwise_equal(got.logprobs[row], values[row, want], label=f"row {row}")
        assert int(got.selected_token_ranks[row]) == int((logits[row] >= logits[row, token]).sum())


def test_a_row_does_not_see_its_neighbours_or_how_many_tokens_they_want() -> None:
    logits = rows(20)
    tokens = list(range(20))
    batch = score(logits, tokens, 17)
    for row in range(20):
        alone = score(logits[row : row + 1], tokens[row : row + 1], 4)
        assert_bitwise_equal(batch.logprobs[row, :5], alone.logprobs[0], label="scores")
        assert batch.logprob_token_ids[row, :5].tolist() == alone.logprob_token_ids[0].tolist()
        assert batch.selected_token_ranks[row] == alone.selected_token_ranks[0]


def test_logits_modes_return_logits() -> None:
    logits = rows(3)
    got = score(logits, [5, 6, 7], 2, is_logits=True)
    assert_bitwise_equal(got.logprobs, logits.gather(1, got.logprob_token_ids), label="logits")


@pytest.mark.parametrize("num_top", [0, 2, 5])
def test_named_ids_take_the_place_of_the_best_tokens(num_top: int) -> None:
    logits = rows(3)
    custom = (torch.tensor([2, 0, 3]), torch.tensor([[10, 11, 99], [99, 99, 99], [20, 21, 22]]))
    got = score(logits, [1, 2, 3], num_top, custom=custom)
    plain = score(logits, [1, 2, 3], num_top)
    width = 1 + max(num_top, 3)
    values = log_softmax(logits)
    assert got.logprobs.shape == (3, width)
    assert got.logprob_token_ids[0].tolist() == [1, 10, 11] + [0] * (width - 3)
    assert_bitwise_equal(got.logprobs[0, :3], values[0, [1, 10, 11]], label="two named ids")
    assert got.logprobs[0, 3:].tolist() == [NEVER] * (width - 3)
    assert_bitwise_equal(got.logprobs[1, : num_top + 1], plain.logprobs[1], label="no named id")
    assert got.logprobs[1, num_top + 1 :].tolist() == [NEVER] * (width - num_top - 1)
    assert got.logprob_token_ids[2, :4].tolist() == [3, 20, 21, 22]


class Batch:
    """The layout of a step: requests as (slot, positions already read, rows of this step, length it will fill)."""

    def __init__(self, *requests: tuple[int, int, int, int]) -> None:
        slots, starts, counts, lengths = (np.array(column, dtype=np.int32) for column in zip(*requests, strict=True))
        self.req_ids = [f"r{slot}" for slot in slots]
        self.idx_mapping_np = slots
        self.num_computed_prefill_tokens_np = starts
        self.num_scheduled_tokens = counts
        self.prefill_len_np = lengths
        self.query_start_loc_np = np.concatenate(([0], np.cumsum(counts)))


PROMPTS = {0: 9, 1: 700, 2: 1, 3: 6}  # slot to prompt length
HIDDEN = {slot: rows(700, seed=slot) for slot in PROMPTS}  # the "hidden states" are the logits
TOKENS = torch.randint(0, VOCABULARY, (4, 800), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
LENGTHS = np.array([PROMPTS[slot] for slot in sorted(PROMPTS)])


def worker(wanted: dict[int, int], mode: str = "raw_logprobs") -> Any:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    from deepinfer_plugin.sampling.prompt_logprobs import PromptLogprobs

    made = PromptLogprobs.adopt(PromptLogprobsWorker(4, torch.device("cpu"), mode))
    for slot in PROMPTS:
        fields: Any = SimpleNamespace(
            prompt_logprobs=wanted.get(slot), prompt_logprob_token_ids=None, prompt_logprob_start=None
        )
        made.add_request(f"r{slot}", slot, fields)
    return made


def step(made: Any, *requests: tuple[int, int, int, int]) -> dict[str, Any]:
    hidden = torch.cat([HIDDEN[slot][start : start + count] for slot, start, count, _ in requests])
    found: dict[str, Any] = made.compute_prompt_logprobs(
        lambda part: part, hidden, Batch(*requests), TOKENS, torch.zeros(4), LENGTHS
    )
    return found


def want(slot: int, num_top: int) -> Any:
    """Row p scores token p + 1."""
    length = PROMPTS[slot]
    return score(HIDDEN[slot][: length - 1], TOKENS[slot, 1:length].tolist(), num_top)


@pytest.mark.parametrize("num_top", [0, 3, -1])
def test_prompt_rows_are_scored_alone_in_company_and_in_chunks(num_top: int) -> None:
    expected = want(0, VOCABULARY if num_top == -1 else num_top)
    whole = step(worker({0: num_top}), (0, 0, 9, 9))["r0"]
    made = worker({0: num_top, 1: 20})
    assert step(made, (1, 0, 300, 700), (0, 0, 4, 9), (3, 0, 6, 6)) == {}
    assert step(made, (0, 4, 4, 9), (1, 300, 399, 700)) == {}
    found = step(made, (1, 699, 1, 700), (0, 8, 1, 9))
    assert sorted(found) == ["r0", "r1"]
    for got, label in [(whole, "whole"), (found["r0"], "chunks")]:
        assert_bitwise_equal(got.logprobs, expected.logprobs, label)
        assert_bitwise_equal(got.logprob_token_ids, expected.logprob_token_ids, label)
        assert_bitwise_equal(got.selected_token_ranks, expected.selected_token_ranks, label)
    assert_bitwise_equal(found["r1"].logprobs, want(1, 20).logprobs, label="the longer one")


def test_a_prompt_of_one_token_and_rows_after_the_prompt_give_nothing() -> None:
    made = worker({2: 1, 3: 1})
    assert step(made, (2, 0, 1, 1)) == {}
    assert sorted(step(made, (3, 0, 6, 6))) == ["r3"]
    assert step(made, (3, 6, 1, 6)) == {}
    assert step(made, (3, 0, 8, 8)) == {}, "resumed after a preemption: its prompt was scored before"


def test_named_ids_of_prompt_rows() -> None:
    made = worker({})
    ids = np.array([[4, 5], [6, -1], [7, 8]], dtype=np.int64)
    fields: Any = SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=ids, prompt_logprob_start=2)
    made.add_request("r3", 3, fields)

    def run(*requests: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
        hidden = torch.cat([HIDDEN[slot][start : start + count] for slot, start, count, _ in requests])
        found: dict[str, torch.Tensor] = made.compute_prompt_token_id_logprobs(
            lambda part: part, hidden, Batch(*requests), LENGTHS
        )
        return found

    assert run((0, 0, 5, 9), (3, 0, 3, 6)) == {}
    got = run((3, 3, 3, 6))["r3"]
    values = log_softmax(HIDDEN[3])
    expected = torch.tensor([[values[2, 4], values[2, 5]], [values[3, 6], NEVER], [values[4, 7], values[4, 8]]])
    assert_bitwise_equal(got, expected, label="named ids")
    assert run((3, 6, 1, 6)) == {}
    made.add_request("r3", 3, fields)
    assert run((3, 3, 3, 6)) == {}, "begun behind the first row that is asked for"
    assert made.token_id_scores == {}
