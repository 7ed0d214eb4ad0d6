"""From an answer to its verdict, by the benchmark's grader; the same whether a run grades or a report does."""

from __future__ import annotations

from deepinfer_evals.benchmark import Question
from deepinfer_evals.endpoint import Answer
from deepinfer_evals.graders.choice import grade_choice
from deepinfer_evals.graders.integer import grade_integer
from deepinfer_evals.graders.verdict import Outcome, Verdict
from deepinfer_evals.judge import Judgements

UNJUDGED = Verdict.of(Outcome.UNJUDGED)


def stored_verdict(grader: str, question: Question, answer: Answer, judgements: Judgements | None) -> Verdict:
    """The verdict that needs no judge to be asked; UNJUDGED where the judge has not spoken yet.

    An answer that a length limit cut counts as truncated whatever stands in it: the model had not finished.
    """
    if grader == "judge":
        if answer.is_truncated:
            return UNJUDGED.cut()
        found = None if judgements is None else judgements.verdict(question, answer.text)
        return UNJUDGED if found is None else found
    grade = {"integer": grade_integer, "choice": grade_choice}[grader]
    verdict = grade(answer.text, question.gold)
    return verdict.cut() if answer.is_truncated else verdict
