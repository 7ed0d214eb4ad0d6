"""What a grader can say, and the part of an answer that it may look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Outcome(StrEnum):
    """Verdict of one answer; only ``CORRECT`` counts in a score."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no answer"
    AMBIGUOUS = "ambiguous"
    TRUNCATED = "truncated"
    UNJUDGED = "unjudged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One verdict.

    Attributes:
        outcome: what counts.
        found: the answer that was read out of the text, "" where there was none.
        if_whole: of a truncated answer, the verdict on the text up to the cut; otherwise ``outcome``.
    """

    outcome: Outcome
    found: str
    if_whole: Outcome

    @classmethod
    def of(cls, outcome: Outcome, found: str = "") -> Verdict:
        return cls(outcome=outcome, found=found, if_whole=outcome)

    def cut(self) -> Verdict:
        """The verdict where the length limit ended the answer: the model had not finished, so nothing counts."""
        return Verdict(outcome=Outcome.TRUNCATED, found=self.found, if_whole=self.outcome)


def final_text(content: str) -> str:
    """The text after the reasoning, where a server without a reasoning parser returns both in one."""
    head, close, tail = content.rpartition(THINK_CLOSE)
    if close:
        return tail
    del head
    return content.partition(THINK_OPEN)[0] if content.lstrip().startswith(THINK_OPEN) else content


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Begin, end and content of each ``\boxed{...}`` or ``\fbox{...}`` with balanced braces, in order."""
    found = []
    for word in (r"\boxed", r"\fbox"):
        begin = text.find(word)
        while begin >= 0:
            at = begin + len(word)
            while at < len(text) and text[at] in " \t":
                at += 1
            end = _closing(text, at) if at < len(text) and text[at] == "{" else -1
            if end >= 0:
                found.append((begin, end + 1, text[at + 1 : end]))
            begin = text.find(word, at)
    return sorted(found)


def _closing(text: str, opening: int) -> int:
    depth = 0
    at = opening
    while at < len(text):
        if text[at] == "\\":
            at += 2  # an escaped brace is text
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
        at += 1
    return -1
