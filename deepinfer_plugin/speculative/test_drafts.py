"""Which drafts stand, row by row; no engine."""

from __future__ import annotations

import torch

from deepinfer_plugin.speculative.drafts import accepted_prefix, mend_drafts


def _verify(
    sampled: list[int], read: list[int], starts: list[int], invalid: list[bool] | None = None
) -> tuple[list[list[int]], list[int]]:
    tokens, num_sampled = accepted_prefix(
        torch.tensor(sampled),
        torch.tensor(read, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        4,
        None if invalid is None else torch.tensor(invalid),
    )
    return tokens.tolist(), num_sampled.tolist()


def test_drafts_stand_up_to_the_first_that_differs_and_the_draw_there_takes_its_place() -> None:
    tokens, num_sampled = _verify([5, 6, 7, 8], [1, 5, 6, 9], [0, 4])
    assert num_sampled == [3]
    assert tokens == [[5, 6, 7, 8]]


def test_a_draft_that_is_right_again_after_a_wrong_one_does_not_stand() -> None:
    assert _verify([5, 6, 7, 8], [1, 5, 0, 7], [0, 4])[1] == [2]


def test_all_right_gives_the_bonus_token() -> None:
    assert _verify([5, 6, 7, 8], [1, 5, 6, 7], [0, 4])[1] == [4]


def test_requests_have_any_number_of_rows_and_do_not_see_each_other() -> None:
    # the first row of the second request has read what the last row of the first draws: no draft of the first
    tokens, num_sampled = _verify([5, 6, 6, 7, 8, 9], [1, 5, 6, 6, 3, 4], [0, 2, 3, 6])
    assert num_sampled == [2, 1, 1]
    assert tokens == [[5, 6, 0, 0], [6, 0, 0, 0], [7, 8, 9, 0]]


def test_a_draft_that_no_grammar_has_checked_does_not_stand() -> None:
    assert _verify([5, 6, 7, 8], [1, 5, 6, 7], [0, 4], [False, False, True, False])[1] == [2]


def test_impossible_drafts_become_an_id_that_the_model_can_read() -> None:
    ids = torch.tensor([3, -1, 10, 9, 2**31 - 1], dtype=torch.int32)
    mend_drafts(ids, 10)
    assert ids.tolist() == [3, 0, 0, 9, 0]
