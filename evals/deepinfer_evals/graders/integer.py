r"""Integer answers: the last ``\boxed{...}``, or else the last "answer: ..." line, compared exactly."""

from __future__ import annotations

import re
import unicodedata

from deepinfer_evals.graders.arithmetic import exact_value
from deepinfer_evals.graders.verdict import Outcome, Verdict, boxes, final_text

_HEDGE = re.compile(r"[\s$*.,;()]*(?:or|and|or possibly|oder|ou|o|或|或者|или)[\s$*.,;()]*", re.IGNORECASE)
_KEYWORD = re.compile(
    r"(?:\banswer|\bresult|\bAntwort|\brespuesta|\br[ée]ponse|\bответ|\brisposta|\bresposta|答案|答え|정답|답)"
    r"[*_`\s]*(?:is|are|ist|es|est|è|é|lautet|是|为|為|は)?[*_`\s]*[:：=]?\s*(?P<rest>[^\n]*)",
    re.IGNORECASE,
)
_LIST = re.compile(
    r"\bor\b|\band\b|\boder\b|\\text\s*\{\s*(?:or|and)\s*\}|\\pm|±|;|\\quad|或|，|、|(?<=\d),\s+(?=-?\d)"
)
_NUMBER = re.compile(r"[-+−–]?\s*[\\$]*\d[\d,.{}'_]*")


def grade_integer(content: str, gold: str) -> Verdict:
    """Verdict on the final text of an answer whose right value is ``gold``."""
    expected = exact_value(gold)
    assert expected is not None, f"integer: the right answer is {gold!r}, expected a number"
    text = unicodedata.normalize("NFKC", final_text(content))
    stated = _stated(text)
    if stated is None:
        return Verdict.of(Outcome.NO_ANSWER)
    if isinstance(stated, Outcome):
        return Verdict.of(stated)
    if _is_list(stated):
        return Verdict.of(Outcome.AMBIGUOUS, stated)
    value = exact_value(stated.replace("\\approx", "=").replace("≈", "=").rpartition("=")[2])
    return Verdict.of(Outcome.CORRECT if value == expected else Outcome.WRONG, stated)


def _stated(text: str) -> str | Outcome | None:
    """What the answer states as its result; AMBIGUOUS for two different boxes in one breath, None for nothing."""
    found = [box for box in boxes(text) if box[2].strip()]
    if found:
        content = found[-1][2].strip()
        if len(found) > 1 and _HEDGE.fullmatch(text[found[-2][1] : found[-1][0]]):
            before = found[-2][2].strip()
            if before != content and exact_value(before) != exact_value(content):
                return Outcome.AMBIGUOUS
        return content
    lines = [match["rest"].strip() for match in _KEYWORD.finditer(text)]
    for rest in reversed(lines):
        number = _leading_number(rest)
        if number is not None:
            return number
    whole = text.strip().strip("*_`.").strip()
    return whole if exact_value(whole) is not None and len(whole.splitlines()) == 1 else None


def _leading_number(rest: str) -> str | None:
    """The number, expression or list that a line after "answer:" begins with; prose around it is left out."""
    rest = rest.strip().strip("*_`").strip()
    if exact_value(rest.rpartition("=")[2]) is not None or (_is_list(rest) and _NUMBER.match(rest)):
        return rest
    sentence = re.split(r"(?<!\d)\.|\.(?!\d)|\bbecause\b|\bsince\b|[!?](?!\d)", rest)[0].strip()
    if exact_value(sentence.rpartition("=")[2]) is not None:
        return sentence
    number = _NUMBER.match(sentence)
    return None if number is None else number[0].rstrip(".,")


def _is_list(text: str) -> bool:
    parts = [part for part in _LIST.split(text) if part.strip(" ${}()\\")]
    return "\\pm" in text or "±" in text or sum(any(c.isdigit() for c in part) for part in parts) > 1
