"""What the user chose about bounded replay, checked. Loads neither torch nor vLLM."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepinfer_plugin.errors import SettingError

MODE_VARIABLE = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"
KEEP_VARIABLE = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"
BACKTRACKING_VARIABLE = "DEEPINFER_MAX_BACKTRACKING_TOKENS"
ENCODER_VARIABLE = "DEEPINFER_ENCODER_REPLAY"
ALLOW_VARIABLE = "DEEPINFER_ALLOW_APPROXIMATE_REPLAY"
DEFAULT_KEEP_TOKENS = 140  # DeepInfer's advised value; another number is another function, with other bits
ENCODER_RULE = "exact, bounded or segment:N with N a positive multiple of the block"


class TruncationMode(enum.Enum):
    """What the decoder layers compute of a prompt.

    ``OFF``: every row, with full windows. ``MASK``: every row, but no window key before the last ones; the oracle.
    ``COMPACT``: only the last rows, which get the same bits as under ``MASK``.
    """

    OFF = "off"
    MASK = "mask"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPolicy:
    """Where the windows of the encoder layers come from after a prefix hit.

    Attributes:
        kind: ``exact``, ``segment`` or ``bounded``.
        segment: N of ``segment:N``, else 0.
    """

    kind: str = "exact"
    segment: int = 0

    @classmethod
    def parse(cls, text: str) -> EncoderPolicy:
        """Read the text of the variable; ``ValueError`` outside ``ENCODER_RULE``."""
        kind, colon, number = text.partition(":")
        if kind == "segment" and number.isascii() and number.isdigit() and 0 < len(number) <= 9 and int(number) > 0:
            return cls(kind=kind, segment=int(number))
        if kind in ("exact", "bounded") and not colon:
            return cls(kind=kind)
        raise ValueError(text)

    def __str__(self) -> str:
        return f"{self.kind}:{self.segment}" if self.kind == "segment" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The five variables of bounded replay.

    Raises:
        SettingError: two of them contradict each other.
    """

    mode: TruncationMode = TruncationMode.COMPACT
    keep_tokens: int = DEFAULT_KEEP_TOKENS
    max_backtracking_tokens: int = 0
    encoder: EncoderPolicy = EncoderPolicy()
    allow_approximate: bool = False

    def __post_init__(self) -> None:
        if self.encoder.kind == "bounded" and not self.allow_approximate:
            raise SettingError(
                f"replay: {ENCODER_VARIABLE} is 'bounded', with which a prefix hit changes the bits of an answer, "
                f"expected exact or segment:N in batch-invariant mode; set {ALLOW_VARIABLE}=1 to serve it all the same"
            )
        if self.encoder.kind != "exact" and self.mode is TruncationMode.OFF:
            raise SettingError(
                f"replay: {ENCODER_VARIABLE} is {str(self.encoder)!r} and {MODE_VARIABLE} is 'off', expected exact: "
                f"with off a hit needs the windows of the decoder layers too; choose mask or compact"
            )

    @property
    def is_on(self) -> bool:
        """Whether the decoder layers leave prompt rows out of their windows."""
        return self.mode is not TruncationMode.OFF

    @property
    def is_approximate(self) -> bool:
        """Whether an answer may depend on the length of a prefix hit."""
        return self.encoder.kind == "bounded"

    def backtracking(self, num_drafts: int) -> int:
        """Positions that a step may have to give back."""
        return max(self.max_backtracking_tokens, num_drafts + 1)

    def check_model(self, sliding_window: int, num_drafts: int, block_size: int) -> None:
        """Compare with the model and the engine.

        Args:
            sliding_window: of the model.
            num_drafts: drafted tokens per step.
            block_size: tokens in a block of the growing caches.

        Raises:
            SettingError: too few rows are kept, or a segment is no multiple of the block.
        """
        backtracking = self.backtracking(num_drafts)
        if self.is_on and self.keep_tokens < sliding_window + backtracking:
            raise SettingError(
                f"replay: {KEEP_VARIABLE} is {self.keep_tokens}, expected at least {sliding_window + backtracking}: "
                f"window {sliding_window} + backtracking {backtracking} (the larger of {BACKTRACKING_VARIABLE} "
                f"{self.max_backtracking_tokens} and drafts + 1, {num_drafts + 1}); raise {KEEP_VARIABLE} "
                f"(default {DEFAULT_KEEP_TOKENS}) or set {MODE_VARIABLE}=off"
            )
        if self.encoder.segment % block_size != 0:
            raise SettingError(
                f"replay: {ENCODER_VARIABLE} is {str(self.encoder)!r}, expected a multiple of the block size "
                f"{block_size} after segment:; choose another N or another --block-size"
            )

    def to_json(self) -> dict[str, str | int | bool]:
        """Plain values, for provenance and status."""
        return {
            "mode": self.mode.value,
            "keep_tokens": self.keep_tokens,
            "max_backtracking_tokens": self.max_backtracking_tokens,
            "encoder": str(self.encoder),
            "allow_approximate": self.allow_approximate,
        }
