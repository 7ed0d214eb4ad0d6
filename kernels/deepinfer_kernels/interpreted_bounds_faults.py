"""Kernels that leave their arguments, for the test of ``interpreted_bounds``; needs ``TRITON_INTERPRET=1``.

``python -m deepinfer_kernels.interpreted_bounds_faults`` prints what the checker says of each, a line per fault, and
raises where it says nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from deepinfer_kernels.interpreted_bounds import checked_bounds


@triton.jit
def _copy_kernel(x_ptr, out_ptr, load_shift, store_shift, num_loaded, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place + load_shift, mask=place < num_loaded, other=0.0)
    tl.store(out_ptr + place + store_shift, x, mask=place < 5)


@triton.jit
def _count_kernel(x_ptr, count_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(count_ptr + tl.load(x_ptr + tl.arange(0, BLOCK)), 1)


@triton.jit
def _rows_kernel(out_ptr, stride_t, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0) * stride_t + tl.arange(0, BLOCK), 1.0)


def _copy(load_shift: int, store_shift: int, num_loaded: int = 5) -> None:
    """Five of the eight elements of one tensor to another."""
    _copy_kernel[(1,)](torch.zeros(5), torch.zeros(5), load_shift, store_shift, num_loaded, BLOCK=8)


def _count_from_unwritten_memory() -> None:
    _count_kernel[(1,)](torch.empty(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), BLOCK=4)


def _write_between_rows() -> None:
    """Four values to rows of three; the memory behind them belongs to another tensor of the same storage."""
    _rows_kernel[(2,)](torch.zeros(2, 6)[:, :3], 6, BLOCK=4)


FAULTS: tuple[Callable[[], None], ...] = (
    lambda: _copy(1, 0),
    lambda: _copy(0, -1),
    lambda: _copy(0, 0, 6),
    _count_from_unwritten_memory,
    _write_between_rows,
)


def run() -> list[str]:
    """What the checker says of each fault; the same kernels inside their arguments pass and write what they should."""
    x, out = torch.arange(5.0), torch.zeros(2, 5)
    with checked_bounds() as launches:
        _copy_kernel[(1,)](x, out[1], 0, 0, 5, BLOCK=8)
        _rows_kernel[(2,)](torch.zeros(2, 6)[:, :4], 6, BLOCK=4)
    assert launches.total() == 2, launches
    assert torch.equal(out, torch.stack((torch.zeros(5), x))), out
    found = []
    for fault in FAULTS:
        try:
            with checked_bounds():
                fault()
        except InterpreterError as error:
            found.append(str(error.__cause__))
        else:
            raise AssertionError(f"fault {len(found)} was not found")
    return found


if __name__ == "__main__":
    print(*run(), sep="\n")  # noqa: T201
