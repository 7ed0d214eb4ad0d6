"""What users ask for: kinds of request with their lengths and rates, and what they add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_plugin.errors import SettingError

_RULE = "PROMPT:ANSWER or PROMPT:ANSWER:RATE, tokens and requests a second, for example 4096:512:2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one kind. ``rate`` is in requests a second, over all GPUs."""

    prompt: int
    answer: int
    rate: float

    @classmethod
    def parse(cls, text: str) -> Load:
        """From the command line.

        Raises:
            SettingError: the text is not three numbers, or one of them is out of range.
        """
        parts = text.split(":")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts[:2]):
            raise SettingError(f"sizing: --load is {text!r}, expected {_RULE}")
        try:
            rate = float(parts[2]) if len(parts) == 3 else 1.0
        except ValueError:
            raise SettingError(f"sizing: --load is {text!r}, expected {_RULE}") from None
        prompt, answer = int(parts[0]), int(parts[1])
        if prompt < 1 or answer < 1:
            raise SettingError(f"sizing: --load is {text!r}, expected a prompt and an answer of 1 token or more")
        if not (math.isfinite(rate) and rate > 0):
            raise SettingError(f"sizing: --load is {text!r}, expected a rate above 0")
        return cls(prompt=prompt, answer=answer, rate=rate)

    @property
    def length(self) -> int:
        """Tokens of a request when it ends."""
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Loads that come at the same time."""

    loads: tuple[Load, ...]

    def check(self, max_position_embeddings: int) -> None:
        """Refuse requests that the model cannot hold.

        Raises:
            SettingError: names the load.
        """
        for load in self.loads:
            if load.length > max_position_embeddings:
                raise SettingError(
                    f"sizing: --load is {load.prompt}:{load.answer}, requests of {load.length} tokens, expected at "
                    f"most {max_position_embeddings}, the model's max_position_embeddings"
                )

    @property
    def answer_rate(self) -> float:
        """Answer tokens a second."""
        return sum(load.rate * load.answer for load in self.loads)

    @property
    def mean_context(self) -> float:
        """Tokens before a decoded token, over all of them."""
        return sum(load.rate * load.answer * (load.prompt + load.answer / 2) for load in self.loads) / self.answer_rate

    def share(self, load: Load) -> float:
        """Of the requests that decode at a time, those of this load; all decode at one speed."""
        return load.rate * load.answer / self.answer_rate

    @property
    def longest(self) -> int:
        return max(load.length for load in self.loads)
