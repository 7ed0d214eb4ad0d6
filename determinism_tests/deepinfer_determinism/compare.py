"""Rows of two runs, aligned by request and position, compared bit by bit. Never text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_determinism.results import FirstDifference
from deepinfer_plugin.engine_child.plan import Request
from deepinfer_plugin.engine_child.run import RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one completion.

    Attributes:
        first: position of the first row; row i predicts the token at position ``first + i + 1``.
        values: [num_rows, vocab_size] fp32.
        tokens: [num_rows] int64, the token at the next position; -1 where it was not chosen by this run.
    """

    first: int
    values: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, request: Request, result: RequestResult, completion: int) -> Rows:
        """Rows of a completion, those of the prompt before them where they were asked for."""
        values, tokens = result.logits[completion], result.tokens[completion]
        first = len(request.tokens) - 1
        if result.prompt_logits is None:
            return cls(first=first, values=values, tokens=tokens)
        num_prompt = result.prompt_logits.shape[0]
        known = torch.full((num_prompt,), -1, dtype=torch.int64)
        return cls(
            first=first - num_prompt,
            values=torch.cat([result.prompt_logits, values]),
            tokens=torch.cat([known, tokens]),
        )

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + self.values.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows compared, rows among them that differ, and the first of these."""

    rows: int = 0
    differences: int = 0
    first: FirstDifference | None = None

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            rows=self.rows + other.rows,
            differences=self.differences + other.differences,
            first=self.first if self.first is not None else other.first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A request and what an engine gave for it."""

    request: Request
    result: RequestResult

    def rows(self, completion: int) -> Rows:
        """Rows of one completion."""
        return Rows.of(self.request, self.result, completion)

    @property
    def count(self) -> int:
        """Completions that came."""
        return len(self.result.logits)


def compare_request(name: str, want: Given, got: Given, *, may_be_short: bool = False) -> Comparison:
    """Compare all completions of a request.

    Args:
        name: for the report.
        want: of the run that is compared with; its prompt may end elsewhere, positions are compared.
        got: of this run.
        may_be_short: the request was aborted in this run: rows may be missing at its end.
    """
    total = Comparison()
    for index in range(max(want.count, got.count)):
        label = name if max(want.count, got.count) == 1 else f"{name}[{index}]"
        if index >= min(want.count, got.count):
            missing = FirstDifference(request=label, position=0, got=_count(got), want=_count(want))
            total += Comparison(rows=1, differences=1, first=missing)
            continue
        if _is_partial(got):
            total += compare_partial(label, want.rows(index), got, index)
        else:
            total += compare_rows(label, want.rows(index), got.rows(index), may_be_short)
    return total


def _is_partial(given: Given) -> bool:
    """It asked for some log-probabilities only, or for none."""
    return bool(given.request.sampling.get("logprobs", -1) != -1)


def compare_partial(name: str, want: Rows, got: Given, completion: int) -> Comparison:
    """Compare the tokens, and the columns that came; no row counts as compared, since none is whole."""
    tokens, values = got.result.tokens[completion], got.result.logits[completion]
    start = len(got.request.tokens) - 1 - want.first
    want_tokens, want_values = want.tokens[start:], _part(want.values, start, want.values.shape[0])
    count = min(len(tokens), len(want_tokens))
    differs = want_tokens[:count] != tokens[:count]
    if values.shape[0] > 0:
        left, right = want_values[:count], _part(values, 0, count)
        column_differs = (left.view(torch.int32) != right.view(torch.int32)) & ~right.isnan()
        differs = differs | column_differs.any(dim=1)
    num_differences = int(differs.sum()) + abs(len(tokens) - len(want_tokens))
    if num_differences == 0:
        return Comparison()
    row = int(differs.nonzero()[0]) if bool(differs.any()) else count
    first = FirstDifference(
        request=name,
        position=want.first + start + row,
        got=f"tokens {tokens.tolist()}",
        want=f"tokens {want_tokens.tolist()}",
    )
    return Comparison(rows=0, differences=num_differences, first=first)


def compare_rows(name: str, want: Rows, got: Rows, may_be_short: bool = False) -> Comparison:
    """Compare where both have rows; a run that ends earlier has missing rows, which count as differing.

    A column that is NaN in ``want`` differs whatever ``got`` holds: the model gives none.
    """
    low, high = max(want.first, got.first), min(want.end, got.end)
    missing = abs(want.end - got.end)
    if may_be_short:
        missing = max(0, got.end - want.end)
    total = Comparison()
    if high > low:
        left = _part(want.values, low - want.first, high - want.first)
        right = _part(got.values, low - got.first, high - got.first)
        differs = (left.view(torch.int32) != right.view(torch.int32)) | left.isnan()
        want_tokens, got_tokens = want.tokens[low - want.first :], got.tokens[low - got.first :]
        want_tokens, got_tokens = want_tokens[: high - low], got_tokens[: high - low]
        other_token = (want_tokens != got_tokens) & (want_tokens >= 0) & (got_tokens >= 0)
        row_differs = differs.any(dim=1) | other_token
        first = None
        if bool(row_differs.any()):
            row = int(row_differs.nonzero()[0])
            first = FirstDifference(
                request=name,
                position=low + row,
                got=_describe(right[row], got_tokens[row], differs[row]),
                want=_describe(left[row], want_tokens[row], differs[row]),
            )
        total = Comparison(rows=high - low, differences=int(row_differs.sum()), first=first)
    if missing > 0:
        ending = FirstDifference(
            request=name, position=high, got=f"rows up to {got.end}", want=f"rows up to {want.end}"
        )
        total += Comparison(rows=missing, differences=missing, first=ending)
    return total


def _part(values: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return values[start:end].contiguous()


def _count(given: Given) -> str:
    error = given.result.facts.error
    return f"{given.count} completions" if error is None else error


def _describe(values: torch.Tensor, token: torch.Tensor, differs: torch.Tensor) -> str:
    """The first differing column with its bits, or the token where all columns agree."""
    if not bool(differs.any()):
        return f"token {int(token)}"
    column = int(differs.nonzero()[0])
    bits = int(values[column : column + 1].view(torch.int32)) & 0xFFFFFFFF
    return f"{float(values[column])!r} (0x{bits:08x}) at token {column}, {int(differs.sum())} columns"
