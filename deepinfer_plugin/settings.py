"""Frozen settings of one process, made from the environment. Importing this module loads neither torch nor vLLM."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_plugin import envs

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

    accelerator: Accelerator = Accelerator.AUTO
    arithmetic: Arithmetic = Arithmetic.REF
    batch_invariant: bool = True
    disable: bool = False

    @classmethod
    def from_envs(cls) -> Settings:
        """Read the DEEPINFER_* variables of this process.

        Raises:
            SettingError: a value is outside its rule; the text names variable, value and rule.
        """
        values = envs.load()
        return cls(
            accelerator=Accelerator(values.accelerator),
            arithmetic=Arithmetic(values.arithmetic),
            batch_invariant=values.batch_invariant,
            disable=values.disable,
        )

    def to_json(self) -> dict[str, str | bool]:
        """Plain values, for provenance and status."""
        return {
            "accelerator": self.accelerator.value,
            "arithmetic": self.arithmetic.value,
            "batch_invariant": self.batch_invariant,
            "disable": self.disable,
        }
