r"""Exact value of a short LaTeX or plain expression: ``\frac{84}{2}``, ``1{,}024``, ``2^{10}``, ``-0``."""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 60  # of a number or a result: an answer is short, and a tower of powers must not take the memory
MAX_FACTORIAL = 40
MAX_LENGTH = 200  # characters of an expression

_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|\\thinspace\b|~|\s+")
_DROPPED = re.compile(
    r"\\(?:displaystyle|textstyle|left|right|big|Big|bigl|bigr|limits)(?![a-zA-Z])|\\\(|\\\)|\\\[|\\\]"
)
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°")
_WRAPPED = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|mbox|textrm|mathit|operatorname)\s*\{([^{}]*)\}\s*(\^\s*\{?\d+\}?)?"
)
_UNIT = re.compile(r"(?<=[\d)}!])\s*(?:[^\W\d_]|[µμ²³/·])[^\d(){}\\]*(?:\^\{?-?\d+\}?)?\s*$")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:([, '_\u2009\u202f])\d{3})(?:\1\d{3})*(?![\d,])")
_TOKEN = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?|\.\d+|[-+*/^(){}!]|\\[dtc]?frac|\\sqrt|\\cdot|\\times|\\div")
_SIGNS = str.maketrans({"−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "÷": "/", "[": "(", "]": ")"})


def exact_value(text: str) -> Fraction | None:
    """The value of an expression of numbers; None where it is something else or not exact."""
    expression = _plain(text) if len(text) <= MAX_LENGTH else ""
    tokens = _TOKEN.findall(expression)
    if not tokens or "".join(tokens) != expression.replace(" ", ""):
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except (_NotANumberError, ZeroDivisionError, RecursionError):
        return None
    return value if reader.at == len(tokens) else None


def _plain(text: str) -> str:
    """Without units, separators, spacing commands and signs of mathematics mode."""
    text = unicodedata.normalize("NFKC", text.replace("½", "1/2")).translate(_SIGNS)
    text = "".join(str(unicodedata.digit(c)) if c.isdigit() and not c.isascii() else c for c in text)
    text = _DEGREE.sub("", _DROPPED.sub("", text)).replace("{,}", ",").replace("\\$", "").replace("$", "")
    text = _WRAPPED.sub(lambda found: found[1] if exact_value_of_digits(found[1]) else " ", text)
    text = _SPACE.sub(" ", text).replace("\\%", "").replace("%", "").replace("€", "").replace("£", "")
    text = text.strip().strip("*_`").strip().rstrip(".,;").strip()
    text = _UNIT.sub("", text).strip()
    return _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)


def exact_value_of_digits(text: str) -> bool:
    """Whether the text is a bare number: then a wrapper such as a bold font is dropped and the number stays."""
    return re.fullmatch(r"\s*[-+]?\d[\d,.]*\s*", text) is not None


class _NotANumberError(Exception):
    """The tokens are no expression of numbers."""


class _Reader:
    """Recursive descent over the tokens; nothing is multiplied that has no sign between it."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def sum(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._next() == "+" else value - self._product()
        return _checked(value)

    def _product(self) -> Fraction:
        value = self._signed()
        while self._peek() in ("*", "/", "\\cdot", "\\times", "\\div"):
            divides = self._next() in ("/", "\\div")
            factor = self._signed()
            value = value / factor if divides else value * factor
        return _checked(value)

    def _signed(self) -> Fraction:
        if self._peek() in ("+", "-"):
            return self._signed() if self._next() == "+" else -self._signed()
        return self._power()

    def _power(self) -> Fraction:
        base = self._postfix()
        if self._peek() != "^":
            return base
        self._next()
        exponent = self._signed() if self._peek() == "-" else self._atom(is_short=True)
        if exponent.denominator != 1 or abs(exponent) > 4 * MAX_DIGITS or abs(base) > 10**MAX_DIGITS:
            raise _NotANumberError
        return _checked(base ** int(exponent))

    def _postfix(self) -> Fraction:
        value = self._atom()
        while self._peek() == "!":
            self._next()
            if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
                raise _NotANumberError
            value = Fraction(math.factorial(int(value)))
        return value

    def _atom(self, *, is_short: bool = False) -> Fraction:
        token = self._next()
        if token in ("(", "{"):
            value = self.sum()
            if self._next() != {"(": ")", "{": "}"}[token]:
                raise _NotANumberError
            return value
        if token.endswith("frac"):
            top, bottom = self._atom(is_short=True), self._atom(is_short=True)
            return top / bottom
        if token == "\\sqrt":
            return _root(self._atom(is_short=True))
        if not (token[0].isdigit() or token[0] == ".") or len(token) > MAX_DIGITS:
            raise _NotANumberError
        if is_short and len(token) > 1 and "." not in token:  # as TeX reads \frac12 and 2^10: one digit at a time
            self.at -= 1
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
            self.at += 1
            return Fraction(token[0])
        return Fraction(token)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _next(self) -> str:
        if self.at >= len(self.tokens):
            raise _NotANumberError
        self.at += 1
        return self.tokens[self.at - 1]


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise _NotANumberError
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top != value.numerator or bottom * bottom != value.denominator:
        raise _NotANumberError
    return Fraction(top, bottom)


def _checked(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > 10 ** (4 * MAX_DIGITS):
        raise _NotANumberError
    return value
