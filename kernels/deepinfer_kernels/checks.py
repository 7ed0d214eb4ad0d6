"""Argument checks that the operations share. Each looks at shapes and dtypes only, never at values."""

from collections.abc import Sequence

import torch

from deepinfer_kernels.errors import ShapeError, UnsupportedError

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)


def require_dtype(op: str, name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise UnsupportedError unless ``tensor`` has one of the dtypes."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise UnsupportedError(f"{op}: {name} is {tensor.dtype}, expected {names}; convert it before the call")


def require_activation(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedError unless ``tensor`` is bf16 or fp32."""
    if tensor.dtype not in ACTIVATION_DTYPES:
        require_dtype(op, name, tensor, ACTIVATION_DTYPES)


def require_out_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless results may have ``dtype``."""
    if dtype not in ACTIVATION_DTYPES:
        raise UnsupportedError(f"{op}: {name} is {dtype}, expected torch.bfloat16 or torch.float32; pass one of them")


def require_shape(op: str, name: str, tensor: torch.Tensor, expected: Sequence[int], because: str) -> None:
    """Raise ShapeError unless ``tensor`` has exactly the shape ``expected``; ``because`` says where it comes from."""
    if tuple(tensor.shape) != tuple(expected):
        raise ShapeError(f"{op}: {name} is {list(tensor.shape)}, expected {list(expected)}; {because}")


def require_rank(op: str, name: str, tensor: torch.Tensor, rank: int, axes: str) -> None:
    """Raise ShapeError unless ``tensor`` has ``rank`` axes, which ``axes`` names."""
    if tensor.dim() != rank:
        raise ShapeError(f"{op}: {name} is {list(tensor.shape)}, expected {rank} axes; pass {axes}")


def require_multiple(op: str, name: str, tensor: torch.Tensor, multiple: int) -> None:
    """Raise ShapeError unless the last axis exists and is a multiple of ``multiple``."""
    if tensor.dim() == 0 or tensor.shape[-1] % multiple != 0:
        raise ShapeError(
            f"{op}: {name} is {list(tensor.shape)}, expected a last axis that is a multiple of {multiple}; "
            f"every {multiple} values share one scale"
        )
