"""What the three Triton kernels of attention are launched with, in their common order."""

import torch

from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.sparse_attention.reference import SlotList


def two_lists(parts: list[SlotList]) -> tuple[SlotList, SlotList]:
    """The window's list and the compressed one, which is an empty list of the window's cache where there is none."""
    window = parts[0]
    if len(parts) == 2:
        return window, parts[1]
    return window, SlotList(kv_cache=window.kv_cache, slots=window.slots[:, :0], fmt=window.fmt)


def first_arguments(
    q: torch.Tensor,
    out: torch.Tensor,
    lists: tuple[SlotList, SlotList],
    sink: torch.Tensor,
    scale: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor | float | None, ...]:
    """Queries, sink, angles, result, caches and lists, the scale, and the strides of the queries."""
    q = last_axis_contiguous(q)
    return (
        q,
        sink.detach().contiguous(),
        cos.contiguous() if cos is not None else None,
        sin.contiguous() if sin is not None else None,
        out,
        lists[0].kv_cache,
        lists[0].slots,
        lists[1].kv_cache,
        lists[1].slots,
        scale,
        q.stride(0),
        q.stride(1),
    )
