"""A grammar behind a trigger: free text, the forced rest, the grammar, and the way back."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer_plugin.grammar.trigger import TriggeredGrammar

VOCABULARY = 70  # three words of a bitmask
A, B, C, BOUND, OTHER = 3, 40, 69, 12, 5


class Counting:
    """A grammar of VOCABULARY tokens: the k-th must be token k; it ends after five. Counts like XGrammar's."""

    def __init__(self) -> None:
        self.accepted = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self.is_terminated():
                return True
            if token != self.accepted:
                return False
            self.accepted += 1
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        kept: list[int] = []
        for token in tokens:
            if token != self.accepted + len(kept) or self.accepted + len(kept) >= 5:
                break
            kept.append(token)
        return kept

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= self.accepted
        self.accepted -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index].fill_(0)
        bitmask[batch_index, 0] = 1 << self.accepted

    def is_terminated(self) -> bool:
        return self.accepted >= 5

    def reset(self) -> None:
        self.accepted = 0


def grammar(*trigger: int, bound: int | None = None) -> TriggeredGrammar:
    return TriggeredGrammar(Counting(), trigger, bound)


def allowed(tested: TriggeredGrammar) -> set[int]:
    bitmask = torch.full((2, 3), 0x55, dtype=torch.int32)
    tested.fill_bitmask(bitmask, 1)
    assert bitmask[0].tolist() == [0x55] * 3, "another request's row"
    words = [word & 0xFFFFFFFF for word in bitmask[1].tolist()]
    return {token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1}


EVERYTHING = set(range(VOCABULARY))


def test_text_is_free_until_the_sequence_and_the_grammar_follows() -> None:
    tested = grammar(A, B, C)
    for token in (OTHER, A, B, A, B):
        assert allowed(tested) == EVERYTHING
        assert tested.accept_tokens("r", [token])
        assert not tested.is_started
    assert tested.accept_tokens("r", [C])
    assert tested.is_started
    for step in range(5):
        assert allowed(tested) == {step}
        assert not tested.is_terminated()
        assert not tested.accept_tokens("r", [OTHER + 60])
        assert tested.accept_tokens("r", [step])
    assert tested.is_terminated()


def test_an_occurrence_may_overlap_the_beginning_of_another() -> None:
    tested = grammar(A, A, B)
    assert tested.accept_tokens("r", [A, A, A, B])
    assert tested.is_started
    again = grammar(A, B, A, B, C)
    assert again.accept_tokens("r", [A, B, A, B, A, B, C])
    assert again.is_started


@pytest.mark.parametrize(
    ("before", "forced"),
    [([OTHER], [A, B, BOUND, C]), ([A, B], [C]), ([A], [A, B, BOUND, C]), ([], [A, B, BOUND, C])],
)
def test_the_bound_token_forces_what_is_missing_of_the_sequence(before: list[int], forced: list[int]) -> None:
    tested = grammar(A, B, BOUND, C, bound=BOUND)
    assert tested.accept_tokens("r", [*before, BOUND])
    for token in forced:
        assert allowed(tested) == {token}
        assert not tested.accept_tokens("r", [OTHER])
        assert tested.accept_tokens("r", [token])
    assert tested.is_started
    assert allowed(tested) == {0}


def test_a_bound_token_that_ends_the_sequence_starts_the_grammar() -> None:
    tested = grammar(A, BOUND, bound=BOUND)
    assert tested.accept_tokens("r", [A, BOUND])
    assert tested.is_started


def test_drafts_are_cut_where_the_sequence_or_the_grammar_breaks_and_nothing_moves() -> None:
    tested = grammar(A, B, bound=BOUND)
    assert tested.validate_tokens([OTHER, A, B, 0, 1, 7]) == [OTHER, A, B, 0, 1]
    assert tested.validate_tokens([BOUND, A, OTHER]) == [BOUND, A]
    assert tested.validate_tokens([A, B, 0, 1, 2, 3, 4, 5]) == [A, B, 0, 1, 2, 3, 4]
    assert not tested.is_started
    assert allowed(tested) == EVERYTHING


def test_taking_tokens_back_is_the_same_as_never_having_had_them() -> None:
    source = random.Random(0)
    reached = set()
    for _ in range(300):
        tested = grammar(A, B, A, C, bound=BOUND)
        taken: list[int] = []
        for _ in range(25):
            choices = sorted(allowed(tested)) if source.random() < 0.8 else [OTHER]
            token = source.choice(choices if len(choices) == 1 else [A, B, C, BOUND, OTHER])
            if source.random() < 0.3 and taken:
                count = source.randint(1, len(taken))
                tested.rollback(count)
                del taken[-count:]
            elif not tested.is_terminated() and tested.accept_tokens("r", [token]):
                taken.append(token)
            fresh = grammar(A, B, A, C, bound=BOUND)
            assert fresh.accept_tokens("r", taken)
            assert (fresh.is_started, fresh.is_terminated()) == (tested.is_started, tested.is_terminated())
            assert allowed(fresh) == allowed(tested)
            reached.add((tested.is_started, len(allowed(tested)) == 1))
    assert reached >= {(False, False), (False, True), (True, True)}


def test_reset_goes_back_to_free_text() -> None:
    tested = grammar(A)
    assert tested.accept_tokens("r", [A, 0, 1])
    tested.reset()
    assert allowed(tested) == EVERYTHING
    assert tested.accept_tokens("r", [A])
    assert allowed(tested) == {0}
