"""The one place that decides which implementation an operation runs."""

import torch


def use_triton(x: torch.Tensor) -> bool:
    """True where ``x`` lies on an NVIDIA GPU: the operation launches its Triton kernel. Elsewhere the reference runs.

    The answer depends on the device alone, so a process with ``TRITON_INTERPRET=1`` keeps calling references on CPU.
    """
    return x.is_cuda
