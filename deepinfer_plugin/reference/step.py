"""What the layers of one forward call share: positions, rotation tables, selections, and the trace of a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from deepinfer_kernels.linear import mxfp8_linear
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_plugin.settings import Arithmetic

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: fp32 [num_tokens, qk_rope_head_dim / 2]
Trace = dict[str, torch.Tensor]  # names of golden/README.md §4, `L{layer}.…`


@dataclass(slots=True, kw_only=True)
class Step:
    """One call of ``ReferenceModel.forward``: consecutive tokens of one request."""

    positions: torch.Tensor  # [num_tokens] int64
    req_idx: torch.Tensor  # [num_tokens] int32, all 0: the one request
    is_image: torch.Tensor | None = None  # [num_tokens] bool, rows inside an image span
    trace: Trace | None = None
    encoder_floor: int = 0  # first window key that the encoder layers may read
    entries_from: int = 0  # first position whose entries are stored: those before it are cached and stay
    selections: dict[int, torch.Tensor] = field(default_factory=dict)  # index source -> int32 [num_tokens, index_topk]
    candidate_blocks: torch.Tensor | None = None  # int32 [num_tokens, candidate_topk_blocks]

    def record(self, name: str, value: torch.Tensor) -> None:
        """Keep ``value`` under ``name`` if the caller asked for a trace."""
        if self.trace is not None:
            self.trace[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The weights whose checkpoint names begin with ``prefix``, and the arithmetic to use them in."""

    tensors: Mapping[str, torch.Tensor]
    prefix: str
    arithmetic: Arithmetic
    eps: float  # rms_norm_eps

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def under(self, name: str) -> Parameters:
        """The weights of the part called ``name``, e.g. ``attn.``."""
        return Parameters(tensors=self.tensors, prefix=self.prefix + name, arithmetic=self.arithmetic, eps=self.eps)

    def quantized_linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [num_tokens, in] by an MXFP8 weight; [num_tokens, out] in the activation dtype."""
        return mxfp8_linear(
            x,
            self[name + ".weight"],
            self[name + ".scale"],
            out_dtype=self.arithmetic.activation_dtype,
            quantize_input=self.arithmetic.quantize,
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last axis of x with the weight called ``name``."""
        return rms_norm(x, self[name + ".weight"], self.eps)
