"""What is timed, as data. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_plugin.errors import SettingError

DECODE_WINDOWS, DECODE_STEPS = 3, 32
"""A decode case reports the median of so many windows of so many tokens per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``num_requests`` prompts of ``context`` random tokens; ``new_tokens`` 1 times the prefill alone.

    A decode case is timed from the step on in which every request has its first token.
    """

    name: str
    num_requests: int
    context: int
    new_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1


def prefill(num_requests: int, context: int) -> Case:
    return Case(name=f"prefill {num_requests} x {context}", num_requests=num_requests, context=context, new_tokens=1)


def decode(num_requests: int, context: int) -> Case:
    return Case(
        name=f"decode {num_requests} at {context}",
        num_requests=num_requests,
        context=context,
        new_tokens=DECODE_WINDOWS * DECODE_STEPS,
    )


# The most telling first: a run that ends early has those.
CASES: tuple[Case, ...] = (
    prefill(8, 4096),
    decode(64, 256),
    decode(1, 256),
    decode(16, 8192),
    decode(256, 256),
    prefill(2, 32768),
    decode(64, 8192),
    decode(16, 256),
    decode(1, 65536),
    decode(1, 8192),
    decode(16, 65536),
    decode(256, 8192),
    decode(64, 65536),
    decode(256, 65536),
)


def select(names: list[str] | None) -> tuple[Case, ...]:
    """Cases whose name starts with one of ``names``; all of them for None.

    Raises:
        SettingError: a name fits no case.
    """
    if names is None:
        return CASES
    for name in names:
        if not any(case.name.startswith(name) for case in CASES):
            known = ", ".join(case.name for case in CASES)
            raise SettingError(f"bench: --case is {name!r}, expected the start of one of: {known}")
    return tuple(case for case in CASES if case.name.startswith(tuple(names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one engine did. Rates are tokens per second: prompt tokens of a prefill, new tokens of a decode.

    ``not_run`` says of each case without a rate why.
    """

    side: str
    start_s: float
    kv_tokens: int
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Figures:
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
