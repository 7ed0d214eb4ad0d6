"""Rows are compared by position and bit: one bit, one token, a missing row and a NaN are all seen."""

from __future__ import annotations

import torch

from deepinfer_determinism.compare import Given, Rows, compare_request, compare_rows
from deepinfer_plugin.engine_child.plan import Request, RequestFacts
from deepinfer_plugin.engine_child.run import RequestResult

VOCABULARY = 6
PROMPT = (3, 4, 5, 6)


def values(rows: int) -> torch.Tensor:
    return torch.arange(rows * VOCABULARY, dtype=torch.float32).view(rows, VOCABULARY)


def given(rows: torch.Tensor, tokens: list[int], num_prompt_rows: int = 0, **sampling: object) -> Given:
    request = Request(name="r", tokens=PROMPT, sampling=sampling)
    result = RequestResult(
        tokens=(torch.tensor(tokens),),
        logits=(rows[num_prompt_rows:],),
        prompt_logits=rows[:num_prompt_rows] if num_prompt_rows else None,
        facts=RequestFacts(),
    )
    return Given(request=request, result=result)


def test_equal_rows_count_and_do_not_differ() -> None:
    found = compare_request("r", given(values(5), [1, 2], 3), given(values(5), [1, 2], 3))
    assert (found.rows, found.differences, found.first) == (5, 0, None)


def test_one_bit_is_found_at_its_position() -> None:
    other = values(5)
    other[4, 2] = torch.nextafter(other[4, 2], torch.tensor(1e9))
    found = compare_request("r", given(values(5), [1, 2], 3), given(other, [1, 2], 3))
    assert (found.rows, found.differences) == (5, 1)
    assert found.first is not None
    assert found.first.position == 4
    assert "at token 2, 1 columns" in found.first.got
    assert "0x" in found.first.want


def test_prompt_rows_that_one_side_lacks_are_not_compared() -> None:
    found = compare_request("r", given(values(5), [1, 2], 3), given(values(5)[3:], [1, 2]))
    assert (found.rows, found.differences) == (2, 0)


def test_another_token_differs_where_the_row_is_equal() -> None:
    found = compare_request("r", given(values(2), [1, 2]), given(values(2), [1, 3]))
    assert found.differences == 1
    assert found.first is not None
    assert (found.first.got, found.first.want) == ("token 3", "token 2")


def test_zeros_of_both_signs_differ() -> None:
    rows = torch.zeros(1, VOCABULARY)
    assert compare_request("r", given(rows, [1]), given(-rows, [1])).differences == 1


def test_nan_differs_from_itself() -> None:
    rows = values(2)
    rows[1, 0] = float("nan")
    assert compare_request("r", given(rows, [1, 2]), given(rows.clone(), [1, 2])).differences == 1


def test_missing_rows_differ_unless_the_request_was_aborted() -> None:
    whole, part = given(values(3), [1, 2, 3]), given(values(2), [1, 2])
    assert compare_request("r", whole, part).differences == 1
    assert compare_request("r", whole, part, may_be_short=True).differences == 0
    assert compare_request("r", part, whole, may_be_short=True).differences == 1


def test_columns_that_were_not_asked_for_are_left_out() -> None:
    few = torch.full((2, VOCABULARY), float("nan"))
    few[:, 1] = values(2)[:, 1]
    want = given(values(2), [1, 2])
    found = compare_request("r", want, given(few, [1, 2], logprobs=1))
    assert (found.rows, found.differences) == (0, 0)
    few[1, 1] += 1
    assert compare_request("r", want, given(few, [1, 2], logprobs=1)).differences == 1
    assert compare_request("r", want, given(few[:0], [1, 3], logprobs=None)).differences == 1


def test_a_missing_completion_differs() -> None:
    none = RequestResult(tokens=(), logits=(), prompt_logits=None, facts=RequestFacts(error="refused"))
    got = Given(request=Request(name="r", tokens=PROMPT), result=none)
    found = compare_request("r", given(values(1), [1]), got)
    assert found.first is not None
    assert (found.differences, found.first.got) == (1, "refused")


def test_rows_align_by_position() -> None:
    want = Rows(first=0, values=values(6), tokens=torch.full((6,), -1))
    got = Rows(first=2, values=values(6)[2:], tokens=torch.arange(4))
    assert compare_rows("r", want, got).differences == 0
    assert compare_rows("r", want, Rows(first=1, values=values(6)[2:], tokens=torch.arange(4))).differences > 0
