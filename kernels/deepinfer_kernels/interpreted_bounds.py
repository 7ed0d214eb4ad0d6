"""Bounds of every access of a kernel in Triton's interpreter; needs ``TRITON_INTERPRET=1``, no GPU.

Within ``checked_bounds`` every storage that a launch is given is copied between guards, so that no address near one
tensor lies in another; after the launch the copies go back. Loads must lie inside the storage of an argument, stores
and atomics inside the elements of the view that was passed: the gaps between its rows belong to somebody else.
Memory that nobody has written holds large integers, so that an index read from it leads far away.
Inline assembly gives zeros here and ``libdevice`` near values: what is loaded and computed is not what this checks.
"""

# mypy: allow-untyped-calls
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import GridExecutor, TensorHandle, _get_np_dtype
from triton.runtime.interpreter import interpreter_builder as builder
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_kernels.errors import DeepInferError

Addresses = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Bytes on both sides of a storage: a row or a page beyond the end of a small tensor is still nearest to that tensor.
# Never touched, so they cost no memory.
_GUARD = 4 << 20
# A multiple of every alignment that a kernel may assume of an argument.
_ALIGNMENT = 128
# Of memory from torch.empty: a large positive integer of any width.
_UNWRITTEN_BYTE = 0x7B


class BoundsError(DeepInferError):
    """A kernel reached for memory that no argument of its launch holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """One tensor of a launch, at its guarded place.

    Attributes:
        name: parameter of the kernel.
        start: address of the first element.
        axes: (size, stride in bytes) of every axis with more than one element, widest first, then the bytes of an
            element; none where there is no element.
        storage_start: address of its storage.
        storage_end: address behind its storage.
    """

    name: str
    start: int
    axes: tuple[tuple[int, int], ...]
    storage_start: int
    storage_end: int

    def in_storage(self, first: Addresses, last: Addresses) -> Flags:
        return np.asarray((first >= self.storage_start) & (last < self.storage_end))

    def in_view(self, first: Addresses, last: Addresses) -> Flags:
        """Whether both ends of an access are bytes of elements; the axes of a view do not overlap."""
        return np.asarray(self._is_element(first) & self._is_element(last))

    def _is_element(self, address: Addresses) -> Flags:
        rest = address - self.start
        inside = np.asarray((rest >= 0) & (len(self.axes) > 0))
        for size, stride in self.axes:
            rest = rest - np.minimum(rest // stride, size - 1) * stride
        return np.asarray(inside & (rest == 0))


class _Guards:
    """Copies of the storages of one launch, each alone between two guards, and the arguments that lie in them."""

    def __init__(self) -> None:
        self.arguments: list[_Argument] = []
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address: the bytes, and their copy

    def moved(self, name: str, value: Any) -> Any:
        """``value`` with every tensor in it replaced by the same view of the copy."""
        if isinstance(value, TensorDescriptor):
            base = self.moved(name, value.base)
            return TensorDescriptor(base, value.shape, value.strides, value.block_shape, value.padding)
        if isinstance(value, tuple):
            return tuple(self.moved(f"{name}[{index}]", part) for index, part in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._rooms:
            held = value.new_empty(0, dtype=torch.uint8).set_(storage)
            # new_empty, which nothing fills here: the guards stay untouched.
            room = value.new_empty(held.numel() + 2 * _GUARD + _ALIGNMENT, dtype=torch.uint8)
            begin = _GUARD - (room.data_ptr() + _GUARD) % _ALIGNMENT
            self._rooms[storage.data_ptr()] = (held, room[begin : begin + held.numel()].copy_(held))
        held, copy = self._rooms[storage.data_ptr()]
        place = copy.storage_offset() // value.element_size() + value.storage_offset()
        view = value.new_empty(0).set_(copy.untyped_storage(), place, value.size(), value.stride())
        self.arguments.append(_argument(name, view, copy))
        return view

    def put_back(self) -> None:
        """Write what the kernel wrote into the storages that the caller holds."""
        for held, copy in self._rooms.values():
            held.copy_(copy)


def _argument(name: str, tensor: torch.Tensor, storage: torch.Tensor) -> _Argument:
    size = tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    # An expanded axis repeats addresses: it adds none. A tensor without elements has no byte.
    axes = sorted(((n, step * size) for n, step in pairs if n > 1 and step > 0), key=lambda axis: -axis[1])
    return _Argument(
        name=name,
        start=tensor.data_ptr(),
        axes=(*axes, (size, 1)) if tensor.numel() > 0 else (),
        storage_start=storage.data_ptr(),
        storage_end=storage.data_ptr() + storage.numel(),
    )


class _Launch:
    """The arguments of the kernel that runs now."""

    def __init__(self, kernel: str, arguments: Sequence[_Argument]) -> None:
        self.kernel, self.arguments = kernel, arguments

    def check(self, action: str, addresses: Any, mask: Any, width: int) -> None:
        """Raise unless the ``width`` bytes at every unmasked address may be reached.

        Raises:
            BoundsError: with kernel, nearest argument and offset.
        """
        mask, addresses = np.broadcast_arrays(np.asarray(mask, dtype=bool), addresses)
        first = addresses[mask].astype(np.int64)
        if first.size == 0:
            return
        last = first + (width - 1)
        allowed = np.zeros(first.shape, dtype=bool)
        for argument in self.arguments:
            allowed |= argument.in_storage(first, last) if action == "load" else argument.in_view(first, last)
        if not allowed.all():
            raise BoundsError(self._message(action, int(first[~allowed][0]), width, int((~allowed).sum())))

    def _message(self, action: str, address: int, width: int, count: int) -> str:
        def distance(argument: _Argument) -> int:
            return max(argument.storage_start - address, address - (argument.storage_end - 1), 0)

        nearest = min(self.arguments, key=distance, default=None)
        if nearest is None:
            return f"{self.kernel}: {action} of {width} bytes, expected none; no tensor was passed"
        if action == "load":
            rule = f"bytes 0 to {nearest.storage_end - nearest.storage_start - 1} of its storage"
            at = f"byte {address - nearest.storage_start} of the storage of {nearest.name}"
        else:
            rule = f"an element of its view, {' x '.join(str(size) for size, _ in nearest.axes)} bytes"
            at = f"byte {address - nearest.start} of {nearest.name}"
        return f"{self.kernel}: {action} of {width} bytes at {at}, expected {rule}; {count} lanes leave the arguments"


class _Zeros:
    """What inline assembly returns here."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


class _Checker:
    """The interpreter's ways to memory, with a look at every address before it is followed."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self._launch = _Launch("no kernel", ())
        self._guards = _Guards()

    def begin(
        self, executor: Any, positional: Sequence[Any], named: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Stands in for ``GridExecutor._init_args_hst``."""
        guards = _Guards()
        moved = [guards.moved(*pair) for pair in zip(executor.arg_names, positional, strict=False)]
        by_name = {name: guards.moved(name, value) for name, value in named.items()}
        self.launches[executor.fn.__name__] += 1
        self._guards, self._launch = guards, _Launch(executor.fn.__name__, guards.arguments)
        return moved, by_name

    def end(self, *unused: object) -> None:
        """Stands in for ``GridExecutor._restore_args_dev``."""
        del unused
        self._guards.put_back()
        self._launch = _Launch("no kernel", ())

    def reach(self, action: str, pointers: Any, mask: Any) -> None:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self._launch.check(action, pointers.data, mask.data, width)


def _unwritten(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_filled(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor = allocate(*sizes, **options)
        tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_UNWRITTEN_BYTE)
        return tensor

    return allocate_filled


def _log1p(x: Any) -> Any:
    return tl.log(x + 1.0)


@contextmanager
def checked_bounds() -> Iterator[Counter[str]]:
    """Check every launch of the block; gives how often each kernel was launched.

    Raises:
        BoundsError: within the block, inside the interpreter's own error: a kernel left its arguments.
    """
    checker = _Checker()
    load, store = builder.create_masked_load, builder.create_masked_store
    read_write, swap = builder.create_atomic_rmw, builder.create_atomic_cas

    def checked_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        checker.reach("load", pointers, mask)
        return load(pointers, mask, *rest, **named)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.reach("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    def checked_read_write(operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.reach("atomic", pointers, mask)
        return read_write(operation, pointers, value, mask, *rest)

    def checked_swap(pointers: Any, *rest: Any) -> Any:
        checker.reach("atomic", pointers, TensorHandle(np.ones(1, dtype=bool), tl.int1))
        return swap(pointers, *rest)

    def zeros(assembly: str, constraints: str, values: Sequence[Any], types: Sequence[Any], *rest: Any) -> _Zeros:
        del assembly, constraints, rest
        shape = values[0].data.shape
        return _Zeros([TensorHandle(np.zeros(shape, dtype=_get_np_dtype(ty)), ty.scalar) for ty in types])

    replaced: list[tuple[object, str, Callable[..., Any]]] = [
        (GridExecutor, "_init_args_hst", lambda *given: checker.begin(*given)),
        (GridExecutor, "_restore_args_dev", checker.end),
        (builder, "create_masked_load", checked_load),
        (builder, "create_masked_store", checked_store),
        (builder, "create_atomic_rmw", checked_read_write),
        (builder, "create_atomic_cas", checked_swap),
        (builder, "create_inline_asm", zeros),
        (libdevice, "exp", lambda x: tl.exp(x)),
        (libdevice, "log1p", _log1p),
        (torch, "empty", _unwritten(torch.empty)),
        (torch, "empty_like", _unwritten(torch.empty_like)),
    ]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(patch.object(owner, name, function))
        yield checker.launches
