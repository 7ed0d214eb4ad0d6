"""A bounded cache of dequantised weights for the references.

It only saves time: a weight that does not fit the budget is made anew on every call, with the same values. Entries are
never evicted, because layers are visited in the same order at every step, where replacing the oldest would miss always.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_DEFAULT_BUDGET_BYTES = 1 << 30


@dataclass(slots=True)
class _Entry:
    stamp: tuple[int, ...]
    value: torch.Tensor
    depends_on: tuple[torch.Tensor, ...]  # held, so that no other tensor can take their addresses


_entries: MutableMapping[torch.Tensor, _Entry] = WeakTensorKeyDictionary()
_budget_bytes = _DEFAULT_BUDGET_BYTES


def set_budget_bytes(num_bytes: int) -> None:
    """Bound the bytes held. Entries that no longer fit are dropped; 0 turns the cache off."""
    global _budget_bytes
    _budget_bytes = num_bytes
    if used_bytes() > num_bytes:
        clear()


def used_bytes() -> int:
    """Bytes of the dense weights held now; a weight that no longer exists does not count."""
    return sum(entry.value.nbytes for entry in _entries.values())


def clear() -> None:
    """Drop every entry. To be called after weights were written through ``.data``, which leaves no trace on them."""
    _entries.clear()


def _stamp(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    stamp: list[int] = []
    for tensor in tensors:
        stamp += (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
    return tuple(stamp)


def dense(
    key_tensor: torch.Tensor, make: Callable[[], torch.Tensor], *, depends_on: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """Return ``make()``, remembered as long as ``key_tensor`` lives and is not written in place.

    Args:
        key_tensor: the stored weight; the same object on every call. One dense form per weight.
        make: builds the dense weight; must depend on ``key_tensor`` and ``depends_on`` only.
        depends_on: further tensors (scales) whose replacement or change makes the entry stale.

    Returns:
        The dense weight; callers must not write to it.
    """
    stamp = _stamp((key_tensor, *depends_on))
    entry = _entries.get(key_tensor)
    if entry is not None and entry.stamp == stamp:
        return entry.value
    value = make()
    if entry is not None:
        del _entries[key_tensor]
    if used_bytes() + value.nbytes <= _budget_bytes:
        _entries[key_tensor] = _Entry(stamp, value, depends_on)
    return value
