"""Every row of the answer table gets the verdict that the table says."""

from __future__ import annotations

import pytest

from deepinfer_evals.graders.answer_table import CHOICES, INTEGERS, JUDGEMENTS
from deepinfer_evals.graders.arithmetic import exact_value
from deepinfer_evals.graders.choice import grade_choice
from deepinfer_evals.graders.integer import grade_integer
from deepinfer_evals.graders.judge_reply import verdict_of_reply
from deepinfer_evals.graders.verdict import Outcome, boxes


@pytest.mark.parametrize(("kind", "answer", "gold", "outcome"), INTEGERS, ids=[row[0] for row in INTEGERS])
def test_an_integer_answer_gets_its_verdict(kind: str, answer: str, gold: str, outcome: Outcome) -> None:
    assert grade_integer(answer, gold).outcome is outcome, kind


@pytest.mark.parametrize(("kind", "answer", "gold", "outcome"), CHOICES, ids=[row[0] for row in CHOICES])
def test_a_choice_gets_its_verdict(kind: str, answer: str, gold: str, outcome: Outcome) -> None:
    assert grade_choice(answer, gold).outcome is outcome, kind


@pytest.mark.parametrize(("kind", "reply", "outcome"), JUDGEMENTS, ids=[row[0] for row in JUDGEMENTS])
def test_a_reply_of_the_judge_gets_its_verdict(kind: str, reply: str, outcome: Outcome) -> None:
    assert verdict_of_reply(reply).outcome is outcome, kind


def test_the_table_is_large_and_names_no_kind_twice() -> None:
    assert len(INTEGERS) + len(CHOICES) + len(JUDGEMENTS) >= 120
    for table in (INTEGERS, CHOICES, JUDGEMENTS):
        kinds = [row[0] for row in table]
        assert len(set(kinds)) == len(kinds)


def test_an_answer_that_was_cut_counts_as_truncated_and_keeps_what_it_would_have_been() -> None:
    verdict = grade_integer(r"\boxed{42} and now I check", "42").cut()
    assert verdict.outcome is Outcome.TRUNCATED
    assert verdict.if_whole is Outcome.CORRECT
    assert verdict.found == "42"


def test_the_same_answer_against_every_option_is_right_once() -> None:
    for kind, answer, gold, outcome in CHOICES:
        verdicts = [grade_choice(answer, letter).outcome for letter in "ABCD"]
        if outcome is Outcome.CORRECT:
            assert verdicts.count(Outcome.CORRECT) == 1, kind
            assert verdicts["ABCD".index(gold)] is Outcome.CORRECT, kind
        elif outcome in (Outcome.NO_ANSWER, Outcome.AMBIGUOUS):
            assert set(verdicts) == {outcome}, kind


@pytest.mark.parametrize("text", ["9**9**9", "__import__('os')", "(" * 3000 + "1", "1" * 5000, "10^{200}!", "-" * 5000])
def test_an_expression_that_would_be_dear_is_no_number(text: str) -> None:
    assert exact_value(text) is None


def test_boxes_are_found_with_their_braces() -> None:
    assert [content for _, _, content in boxes(r"\boxed{a{b}c} \fbox{\}} \boxed{open")] == ["a{b}c", r"\}"]
