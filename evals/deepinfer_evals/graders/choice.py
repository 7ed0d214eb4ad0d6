"""Answers that are one letter: the last statement of an option counts, two options in one statement count as none."""

from __future__ import annotations

import re
import unicodedata

from deepinfer_evals.graders.verdict import Outcome, Verdict, boxes, final_text

_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(?P<body>.*?)(?:^[ \t]*\1[^\n]*$|\Z)", re.MULTILINE | re.DOTALL)
_OPEN = r"(?:[\s*_`$(\[{\"'“]|\\\(|\\text\s*\{|\\mathrm\s*\{|\\textbf\s*\{|\\boxed\s*\{)*"
_LETTER = r"(?P<letter>[A-Za-zАВС])"
_END = r"(?![A-Za-zÀ-ɏЀ-ӿ])(?!['’]\w)"  # no letter may follow: "Answer: Both" names no option
_VERB = r"(?:is|would be|must be|should be|ist|lautet|es|est|è|é)(?!\w)"
_LATIN = r"(?:answer|option|choice|Antwort|respuesta|r[ée]ponse|ответ|risposta|resposta)(?!\w)"
_CJK = (
    r"(?:答案|选项|選項|答え|正解|정답|답)[*_`\s]*(?:应该?|應該?)?(?:选|選)?[是为為は은]?(?:选项|選項)?[*_`\s]*[:：=]?"
)
_STATEMENT = re.compile(
    rf"(?:\b{_LATIN}(?:\s+(?:option|choice|correcta|richtige))?[*_`\s]*"
    rf"(?:{_VERB}\s*[:：]?\s*(?:(?:option|choice|la|die)(?!\w))?|[:：=]\s*(?:(?:option|choice)(?!\w))?)|{_CJK})[*_`\s]*"
    rf"{_OPEN}{_LETTER}{_END}",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(  # "Option B is correct"
    rf"\b(?:answer|option|choice)\s+{_OPEN}(?P<letter>[A-D]){_END}[\s*_`$)\]}}.]*is\s+(?:the\s+)?(?:correct|right|best)",
    re.IGNORECASE,
)
_ALONE = re.compile(r"[\s*_`$(\[{\"'“]*(?P<letter>[A-ZАВС])(?:[\s*_`$)\]}\"'”.:]*|[).:]\s+\S.*)")
_CLOSE = r"[\s*_`$)\]}\"'”.]*"
_ANOTHER = re.compile(
    _CLOSE + r"(?:,|/|&|\+|;|\bor\b|\band\b|\boder\b|\bund\b|\bou\b|\bo\b|\by\b|\bили\b|或者?|和|、)"
    r"\s*(?:(?!not\b|nicht\b)\w+\s+){0,2}" + _OPEN + r"(?P<other>[A-DАВС])(?![^\W_])"
)
_ARTICLE = re.compile(r"\s+[a-z]{2,}")  # "Answer: A constant field": a word follows, no option is named
_REASON = re.compile(r"\s+(?:because|since|as|is|due|for|given|by|with|which|that|would|will|and|or|from|in|but)\b")
_CYRILLIC = str.maketrans("АВС", "ABC")


def grade_choice(content: str, gold: str, letters: str = "ABCD") -> Verdict:
    """Verdict on the final text of an answer whose right option is ``gold``."""
    stated = _stated(unicodedata.normalize("NFKC", final_text(content)), letters)
    if isinstance(stated, Outcome):
        return Verdict.of(stated)
    return Verdict.of(Outcome.CORRECT if stated == gold else Outcome.WRONG, stated)


def _stated(text: str, letters: str) -> str | Outcome:
    outside = _FENCE.sub("\n", text)
    found = _in_text(outside, letters)
    if found is Outcome.NO_ANSWER:
        inside = [match["body"] for match in _FENCE.finditer(text)]
        if inside and len(inside[-1].strip().splitlines()) == 1:  # a block that holds nothing but the answer line
            found = _in_text(inside[-1], letters)
    return found


def _in_text(text: str, letters: str) -> str | Outcome:
    statements: list[tuple[int, str | Outcome]] = []
    for begin, end, content in boxes(text):
        boxed = _boxed(content, letters)
        if boxed is not None:
            statements.append((begin, _unless_hedged(boxed, text[end:], letters)))
    for match in [*_STATEMENT.finditer(text), *_CONFIRMED.finditer(text)]:
        letter = match["letter"].upper() if match.re is _CONFIRMED else _letter_of(match, text)
        if letter is not None:
            statements.append((match.start(), _unless_hedged(letter, text[match.end() :], letters)))
    if statements:
        return max(statements, key=lambda statement: statement[0])[1]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for line in dict.fromkeys([*lines[-1:], *(lines if len(lines) == 1 else [])]):
        alone = _ALONE.fullmatch(line.strip())
        if alone is not None:
            letter = alone["letter"].translate(_CYRILLIC)
            if letter in letters:
                return _unless_hedged(letter, line.strip()[alone.end("letter") :], letters)
    return Outcome.NO_ANSWER


def _letter_of(match: re.Match[str], text: str) -> str | None:
    """The letter that a statement names, or None where it is a word of the sentence."""
    letter, rest = match["letter"], text[match.end() :].partition("\n")[0]
    is_delimited = re.match(r"[)\]}*_`.:,\"'”$]|\s*$", rest) is not None
    if letter.islower() and not is_delimited:
        return None
    upper = letter.upper().translate(_CYRILLIC)
    is_word = _ARTICLE.match(rest) is not None and _REASON.match(rest) is None
    if upper in ("A", "I") and is_word:
        return None
    if upper not in "ABCD" and not is_delimited:
        return None
    return upper


def _boxed(content: str, letters: str) -> str | Outcome | None:
    inner = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", content).strip(" ${}()*.\\")
    named = re.findall(r"(?<![^\W_])[A-ZАВС](?![^\W_])", inner)
    named = [letter.translate(_CYRILLIC) for letter in named]
    if len({letter for letter in named if letter in letters}) > 1:
        return Outcome.AMBIGUOUS
    if re.fullmatch(r"[A-Za-zАВС]", inner):
        return inner.upper().translate(_CYRILLIC)
    leading = re.match(r"(?:Option|Choice|Answer)?\s*:?\s*([A-DАВС])\s*(?:[).:,-]|$)", inner)
    return None if leading is None else leading[1].translate(_CYRILLIC)


def _unless_hedged(stated: str | Outcome, rest: str, letters: str) -> str | Outcome:
    another = _ANOTHER.match(rest.partition("\n")[0])
    if another is None or isinstance(stated, Outcome):
        return stated
    other = another["other"].translate(_CYRILLIC)
    return Outcome.AMBIGUOUS if other in letters and other != stated else stated
