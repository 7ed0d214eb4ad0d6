"""Which PyTorch operations keep the bits of a row in any batch, on which device, and under which condition.

Anything that is not in the table is a gap (gaps.py), and a gap stops the start. The classes:

* ``EXACT``: moves, compares, selects, counts, or rounds once per element as IEEE prescribes: no order of a sum, no
  approximation, so the batch cannot reach the result. Exchanges between ranks that only move bytes belong to it.
* ``MEASURED``: an approximation per element whose bits a test here finds independent of the element's place in the
  buffer and of its neighbours. sigmoid, silu, softplus and exp2 failed that test on the CPU and are therefore absent.
* ``ROW_SUM``: a sum over the last axis of rows whose length does not follow the batch.
* ``PRODUCT``: a matrix product of one fixed shape per row tile or per row.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_kernels import tiling


class Kind(enum.Enum):
    """Why an operation is trusted."""

    EXACT = "exact"
    MEASURED = "measured"
    ROW_SUM = "row sum"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Trust in one operation.

    Attributes:
        kind: the argument for it.
        devices: device types on which it holds.
        violation: takes the call's arguments and returns what is wrong with them, or None.
    """

    kind: Kind
    devices: frozenset[str]
    violation: Callable[[Sequence[Any]], str | None] | None = None


_EVERYWHERE = frozenset({"cpu", "cuda"})
_CPU = frozenset({"cpu"})

# fmt: off
_EXACT = (
    "__and__", "__iand__", "__ior__", "__lshift__", "__or__", "__rshift__", "__xor__", "_to_copy", "_unique2",
    "_unsafe_view", "abs", "add", "add_", "alias", "amax", "amin", "arange", "argmax", "as_strided", "bincount",
    "bitwise_and", "bitwise_and_", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_right_shift_", "bitwise_xor", "cat", "ceil", "chunk", "clamp", "clamp_", "clamp_max", "clamp_max_",
    "clamp_min", "clamp_min_", "clone", "constant_pad_nd", "contiguous", "copy_", "copysign", "cummax", "detach",
    "detach_", "div", "div_", "embedding", "empty", "empty_like", "empty_strided", "eq", "expand", "fill_", "flatten",
    "floor_divide", "full", "full_like", "gather", "ge", "gt", "index", "index_put_", "index_select", "isnan", "le",
    "lift_fresh", "logical_and", "logical_not", "lt", "masked_fill", "masked_fill_", "maximum", "minimum", "movedim",
    "mul", "mul_", "narrow", "ne", "neg", "neg_", "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "ones",
    "ones_like", "pad", "permute", "reciprocal", "reciprocal_", "remainder", "repeat", "repeat_interleave", "reshape",
    "resolve_conj", "resolve_neg", "roll", "round", "round_", "scatter", "scatter_", "searchsorted", "select", "set_",
    "slice", "sort", "split", "split_with_sizes", "sqrt", "sqrt_", "square", "squeeze", "stack", "sub", "sub_", "t",
    "to", "topk", "transpose", "unbind", "unflatten", "unsqueeze", "view", "where", "zeros", "zeros_like",
    "_allgather_base_", "alltoall_base_",
)
# fmt: on

_MEASURED = ["cos", "erf", "exp", "exp_", "log", "log_", "log1p", "log1p_", "rsqrt", "sin"]


def _sums_last_axis(args: Sequence[Any]) -> str | None:
    x, axes = args[0], args[1]
    last = {-1, x.dim() - 1}
    if axes is None or len(axes) != 1 or axes[0] not in last:
        return f"sums axes {axes} of a tensor with {x.dim()} axes, expected the last one only"
    return None


def _has_row_tile(args: Sequence[Any]) -> str | None:
    rows, depth = args[0].shape
    if rows != tiling.REFERENCE_ROW_TILE or depth % tiling.REFERENCE_DEPTH_MULTIPLE != 0:
        return (
            f"multiplies {rows} rows of depth {depth}, expected {tiling.REFERENCE_ROW_TILE} rows and a depth that is a "
            f"multiple of {tiling.REFERENCE_DEPTH_MULTIPLE}"
        )
    return None


def _has_even_depth(args: Sequence[Any]) -> str | None:
    depth = args[0].shape[2]
    if depth % tiling.REFERENCE_DEPTH_MULTIPLE != 0:
        return f"has depth {depth}, expected a multiple of {tiling.REFERENCE_DEPTH_MULTIPLE}"
    return None


def _is_about_floats(args: Sequence[Any]) -> str | None:
    return f"adds up {args[0].dtype}, expected integers, whose sums have no order"


def _is_square(args: Sequence[Any]) -> str | None:
    return None if args[1] == 2 else f"raises to the power {args[1]}, expected 2, which is one product"


def _build() -> dict[str, Proof]:
    table = {name: Proof(kind=Kind.EXACT, devices=_EVERYWHERE) for name in _EXACT}
    table |= {name: Proof(kind=Kind.MEASURED, devices=_EVERYWHERE) for name in _MEASURED}
    # On an H200 the launch shape of a reduction, and the kernel of a batched product, follow the number of rows.
    table |= {name: Proof(kind=Kind.ROW_SUM, devices=_CPU, violation=_sums_last_axis) for name in ("mean", "sum")}
    table["pow"] = Proof(kind=Kind.EXACT, devices=_EVERYWHERE, violation=_is_square)
    for name in ("cumsum", "scatter_add_"):
        table[name] = Proof(kind=Kind.EXACT, devices=_EVERYWHERE, violation=_is_about_floats)
    table["mm"] = Proof(kind=Kind.PRODUCT, devices=_EVERYWHERE, violation=_has_row_tile)
    table["bmm"] = Proof(kind=Kind.PRODUCT, devices=_CPU, violation=_has_even_depth)
    return table


PROOFS: Mapping[str, Proof] = _build()
"""Proof by operation name, without namespace and overload: ``aten.add.Tensor`` is ``add``."""


def gap(operation: str, args: Sequence[Any], device: str) -> str | None:
    """Why one call is not known to be batch-invariant, or None.

    Args:
        operation: ``add``, as in ``PROOFS``.
        args: positional arguments of the call.
        device: device type of its result, ``cpu`` or ``cuda``.
    """
    proof = PROOFS.get(operation)
    if proof is None:
        return "is not in the table"
    if proof.violation is not None and _is_float(args[0]):
        wrong = proof.violation(args)
        if wrong is not None:
            return wrong
    if device not in proof.devices and _is_float(args[0] if args else None):
        return f"has no proof on {device}"
    return None


def _is_float(value: Any) -> bool:
    """Integers have no rounding: an order of their sum cannot show."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
