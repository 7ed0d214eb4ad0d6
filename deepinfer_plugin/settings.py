"""Frozen settings of one process, made from the environment. Importing this module loads neither torch nor vLLM."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_plugin import envs, variables
from deepinfer_plugin.envs import Environment
from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings, TruncationMode
from deepinfer_plugin.variables import PREFIX, VARIABLES, Variable

if TYPE_CHECKING:
    import torch

    from deepinfer_kernels.kv_store import RecordFormat


class Arithmetic(enum.Enum):
    """How activations are rounded and where the model quantises them (golden README, section 2).

    ``REF`` is the released model's own arithmetic and the only mode that is served. ``Q32`` and ``S32`` are for tests:
    they separate the place of every quantiser, and the wiring, from the noise of bf16 rounding.
    """

    REF = "ref"
    Q32 = "q32"
    S32 = "s32"

    @property
    def activation_dtype(self) -> torch.dtype:
        """bf16 in ``REF``, fp32 in the other two."""
        import torch

        return torch.bfloat16 if self is Arithmetic.REF else torch.float32

    @property
    def quantize(self) -> bool:
        """Whether activations and cache entries pass through their 4 and 8 bit formats."""
        return self is not Arithmetic.S32

    @property
    def is_exact_bf16(self) -> bool:
        """Whether softmax P and index scores are rounded to bf16, as the reference forward pass does."""
        return self is Arithmetic.REF

    @property
    def window_format(self) -> RecordFormat:
        """Format of a record of the 128-token window."""
        return self._format("MXFP8")

    @property
    def compressed_format(self) -> RecordFormat:
        """Format of a record of compressed KV."""
        return self._format("NVFP4")

    @property
    def index_format(self) -> RecordFormat:
        """Format of an index key."""
        return self._format("MXFP4")

    def _format(self, quantised: str) -> RecordFormat:
        from deepinfer_kernels.kv_store import RecordFormat

        return RecordFormat[quantised if self.quantize else "FP32"]


class Accelerator(enum.Enum):
    """The kinds of machine that DEEPINFER_ACCELERATOR can name; ``AUTO`` takes what is found."""

    AUTO = "auto"
    NVIDIA = "nvidia"
    ASCEND = "ascend"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose, checked. Equal settings mean equal behaviour on one machine."""

    environment: Environment = field(default_factory=lambda: envs.load({}))

    @classmethod
    def from_envs(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the DEEPINFER_* variables.

        Args:
            environ: the variables to read; None reads those of this process.

        Raises:
            SettingError: a value is outside its rule; the text names variable, value and rule.
        """
        return cls(environment=envs.load(environ))

    def __post_init__(self) -> None:
        _ = self.replay  # two of its variables may contradict each other

    def __getitem__[T](self, variable: Variable[T]) -> T:
        """The value of any variable of the table: ``settings[variables.LOGGING_INTERVAL_STEP]``."""
        return self.environment[variable]

    @property
    def accelerator(self) -> Accelerator:
        return Accelerator(self[variables.ACCELERATOR])

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self[variables.ARITHMETIC])

    @property
    def batch_invariant(self) -> bool:
        return self[variables.BATCH_INVARIANT]

    @property
    def disable(self) -> bool:
        return self[variables.DISABLE]

    @property
    def replay(self) -> ReplaySettings:
        """Bounded replay.

        Raises:
            SettingError: two of its variables contradict each other.
        """
        return ReplaySettings(
            mode=TruncationMode(self[variables.YOCO_PREFILL_TRUNCATION_MODE]),
            keep_tokens=self[variables.YOCO_PREFILL_KEEP_TOKENS],
            max_backtracking_tokens=self[variables.MAX_BACKTRACKING_TOKENS],
            encoder=self[variables.ENCODER_REPLAY],
            allow_approximate=self[variables.ALLOW_APPROXIMATE_REPLAY],
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values by the variables' names without their prefix, for provenance and status."""
        return {_key(variable): _plain(self[variable]) for variable in VARIABLES}

    def answer_settings(self) -> dict[str, Any]:
        """The part of ``to_json`` that answers may depend on."""
        return {_key(variable): _plain(self[variable]) for variable in VARIABLES if variable.changes_answers}


def _key(variable: Variable[Any]) -> str:
    return variable.name.removeprefix(PREFIX).lower()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | EncoderPolicy) else value
