"""Finds the operations of a forward pass for which no proof of batch invariance exists on its device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_batch_invariant.aten import gap
from deepinfer_kernels.errors import DeepInferError


class InvarianceGapError(DeepInferError):
    """The forward pass calls an operation that is not known to keep the bits of a row in any batch."""


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """One kind of unproven call: the operation, its device and what is missing."""

    operation: str
    device: str
    reason: str


class GapRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, looks every PyTorch operation up in the table.

    Attributes:
        gaps: unproven kinds of calls.
        num_calls: operations seen; 0 means that nothing was recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gaps: set[Gap] = set()
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_calls += 1
        if func.namespace in ("aten", "prims", "c10d"):
            name, device = func.overloadpacket.__name__, _device(result)
            reason = gap(name, args, device)
        else:
            name, device, reason = str(func), _device(result), "is not a PyTorch operation of the table"
        if reason is not None:
            self.gaps.add(Gap(name, device, reason))
        return result


def check_forward(run: Callable[[], object], *, label: str) -> int:
    """Run a forward pass and refuse it if one of its operations has no proof.

    Args:
        run: the pass; it should take every branch that serving takes.
        label: what it is, for the message.

    Returns:
        Number of operations looked up.

    Raises:
        InvarianceGapError: names every unproven operation.
    """
    with GapRecorder() as recorder:
        run()
    if recorder.num_calls == 0:
        raise InvarianceGapError(
            f"check_forward: {label} ran 0 operations, expected a forward pass; nothing was proven"
        )
    if recorder.gaps:
        found = "; ".join(f"{g.operation} {g.reason}" for g in sorted(recorder.gaps))
        raise InvarianceGapError(
            f"batch-invariant mode: {label} calls operations without a proof of invariance: {found}; "
            "set DEEPINFER_BATCH_INVARIANT=0 to serve without the promise"
        )
    return int(recorder.num_calls)


def _device(result: Any) -> str:
    while isinstance(result, list | tuple) and result:
        result = result[0]
    return result.device.type if isinstance(result, torch.Tensor) else "cpu"
