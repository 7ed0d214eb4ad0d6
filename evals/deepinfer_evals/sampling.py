"""How an answer is drawn: every parameter is sent, so that no default of a server or a checkpoint takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_plugin.errors import SettingError

MAX_EFFORT = 100
OWN_KEYS = frozenset({
    "messages", "model", "seed", "n", "stream", "vllm_xargs", "return_token_ids", "temperature", "top_p", "top_k",
    "min_p", "max_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "chat_template_kwargs",
    "logprobs",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a run.

    Attributes:
        temperature, top_p, top_k, min_p: as vLLM has them; top_k 0 is off.
        max_tokens: longest answer, reasoning included.
        effort: reasoning effort 1 to 100; 0 answers without reasoning; None leaves the chat template alone, for
            servers of other models.
        extra: further fields of the request, such as ``structured_outputs``.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 131072
    effort: int | None = MAX_EFFORT
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = (
            ("--temperature", self.temperature, 0.0 <= self.temperature <= 10.0, "0 to 10"),
            ("--top-p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("--min-p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "1 or more"),
            ("--effort", self.effort, self.effort is None or 0 <= self.effort <= MAX_EFFORT, "0 to 100, or none"),
        )
        for name, value, is_good, rule in rules:
            if not is_good:
                raise SettingError(f"sampling: {name} is {value}, expected {rule}")
        taken = sorted(OWN_KEYS & set(self.extra))
        if taken:
            raise SettingError(
                f"sampling: --extra-body has the field {taken[0]!r}, expected none that this program sets"
            )

    def to_body(self) -> dict[str, Any]:
        """Fields of the request."""
        body: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": self.max_tokens,
            **self.extra,
        }
        if self.effort is not None:
            body["chat_template_kwargs"] = {"thinking": self.effort > 0, "reasoning_effort": self.effort or "none"}
        return body

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds: the fields themselves."""
        return self.to_body()
