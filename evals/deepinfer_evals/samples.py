"""Two answers to one sample, side by side: identical, or the first token at which they part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_evals.endpoint import Answer
from deepinfer_evals.run_folder import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDifference:
    """One sample whose two answers are not the same.

    Attributes:
        key: question and epoch.
        token: index of the first token that differs; None where all tokens agree.
        there, here: that token on both sides; None where an answer had ended.
        parts: which hashes differ: ``prompt``, ``output``, ``logprobs``; and ``seed`` or ``finish_reason``.
    """

    key: Key
    token: int | None
    there: int | None
    here: int | None
    parts: tuple[str, ...]

    def __str__(self) -> str:
        name = f"question {self.key[0]} epoch {self.key[1]}"
        if self.token is None:
            return f"{name}: same tokens, other {' and '.join(self.parts)}"
        there, here = ("the end" if token is None else str(token) for token in (self.there, self.here))
        return f"{name}: differs at token {self.token}, {there} there, {here} here ({', '.join(self.parts)})"


def difference(key: Key, there: Answer, here: Answer) -> SampleDifference | None:
    """What differs between two answers to one sample; None where nothing does."""
    names = sorted((there.witness.keys() | here.witness.keys()) - {"all"})
    parts = [name for name in names if there.witness.get(name) != here.witness.get(name)]
    parts += [name for name in ("seed", "finish_reason") if getattr(there, name) != getattr(here, name)]
    token = next(
        (index for index, pair in enumerate(zip(there.token_ids, here.token_ids, strict=False)) if pair[0] != pair[1]),
        None,
    )
    shorter = min(len(there.token_ids), len(here.token_ids))
    if token is None and len(there.token_ids) != len(here.token_ids):
        token = shorter
    if token is None and not parts:
        return None
    return SampleDifference(
        key=key, token=token, there=_at(there, token), here=_at(here, token), parts=tuple(parts) or ("token ids",)
    )


def differences(there: Mapping[Key, Answer], here: Mapping[Key, Answer]) -> list[SampleDifference]:
    """Every shared sample that differs, in order."""
    found = (difference(key, there[key], here[key]) for key in sorted(there.keys() & here.keys()))
    return [one for one in found if one is not None]


def _at(answer: Answer, token: int | None) -> int | None:
    return None if token is None or token >= len(answer.token_ids) else answer.token_ids[token]
