"""Every place in the launchers of the Triton kernels where a tile, a path or a launch follows a quantity of the batch.

They run on an accelerator only: a run with ``--device cuda`` counts them, and ``test_thresholds_device.py`` takes both
sides of each on a CPU, with the kernels themselves replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepinfer_determinism.thresholds import Arguments, Sides, Threshold
from deepinfer_kernels import tiling
from deepinfer_kernels.linear.triton_kernel import split_width
from deepinfer_kernels.tiling import NARROW_ROWS_BY_OUTPUTS

CUDA = "cuda"
_KERNELS = "deepinfer_kernels"
_LINEAR = f"{_KERNELS}.linear.triton_kernel"
_PLAIN, _MXFP8 = f"{_LINEAR}:linear_triton", f"{_LINEAR}:mxfp8_parts"
_HC_MIX = f"{_KERNELS}.hc_mix.triton_kernel:hc_mix_triton"
_EXPERTS = f"{_KERNELS}.moe_experts.triton_kernel:moe_experts_triton"
_ROUTE = f"{_KERNELS}.moe_experts.route_kernel:route_pairs"
_INDEX = f"{_KERNELS}.indexer_logits.triton_kernel:indexer_logits_triton"
_CHOOSE = f"{_KERNELS}.indexer_topk.triton_kernel:_choose"
_TOPK = f"{_KERNELS}.indexer_topk.triton_kernel:topk_indices_triton"
_RESTRICT = f"{_KERNELS}.restrict_logits.triton_kernel:restrict_logits_triton"
_TOP_TOKENS = f"{_KERNELS}.sample_tokens.top_tokens_kernel:top_tokens_triton"

_LARGE_WEIGHTS = "the weights of the small checkpoints are unpacked beside the product up to 1,024 rows"
_NOT_DEEP = "no product of the small checkpoints is deep enough to be cut in parts"
_LONG_CONTEXT = "it takes a context of 8,192 entries, longer than those of the small checkpoints"
_FEW_DRAWS = "steps of the harness draw for few rows; the row tests on the device take both sides"
_NO_SUCH_K = "no selection of a released model is larger than TOPK_LARGEST"

Quantity = Callable[[Arguments], int | None]  # None: the call does not come to this choice


def narrow_limit(num_out: int) -> int:
    """Rows up to which a weight with so many outputs is unpacked beside the product."""
    return next(rows for limit, rows in NARROW_ROWS_BY_OUTPUTS if num_out < limit)


def _rows(a: Arguments, weight: str, rows: str, *, is_narrow: bool | None, is_split: bool | None = None) -> int | None:
    """Rows of a product of bf16 operands, where it takes this path."""
    x, w = a[rows], a[weight]
    if x.dtype != torch.bfloat16 or x.shape[0] == 0:
        return None
    depth = x.shape[1] // a.get("num_groups", 1)
    if is_narrow is not None and (x.shape[0] <= narrow_limit(w.shape[0])) != is_narrow:
        return None
    if is_split is not None and (split_width(w.shape[0], depth) < depth) != is_split:
        return None
    return int(x.shape[0])


def _beyond(quantity: Quantity, limit: Callable[[Arguments], int]) -> Callable[[Arguments], Sides]:
    def sides(a: Arguments) -> Sides:
        found = quantity(a)
        return () if found is None else (found > limit(a),)

    return sides


def _table(
    name: str, function: str, unit: str, table: Sequence[tuple[int, Any]], quantity: Quantity, unreachable: str = ""
) -> tuple[Threshold, ...]:
    """A threshold for every border between two entries of a table ``(up to, entry)``."""
    return tuple(
        Threshold(
            name=f"{name} above {limit}",
            function=function,
            value=f"{unit} > {limit}",
            sides=_beyond(quantity, lambda _, limit=limit: limit),  # type: ignore[misc]
            device=CUDA,
            unreachable=unreachable,
        )
        for limit, _ in table[:-1]
    )


def _plain(**path: bool) -> Quantity:
    return lambda a: _rows(a, "weight", "x", is_narrow=path.get("is_narrow"), is_split=path.get("is_split"))


def _mxfp8(**path: bool) -> Quantity:
    return lambda a: _rows(a, "weight", "rows", is_narrow=path.get("is_narrow"), is_split=path.get("is_split"))


def _wide_or_narrow(name: str, function: str, quantity: Quantity) -> Threshold:
    return Threshold(
        name=name,
        function=function,
        value="rows > NARROW_ROWS_BY_OUTPUTS of the weight's outputs",
        sides=_beyond(quantity, lambda a: narrow_limit(a["weight"].shape[0])),
        device=CUDA,
    )


def _tokens(name: str) -> Quantity:
    return lambda a: int(a[name].shape[0]) or None


def _average(a: Arguments) -> int | None:
    num_tokens, top_k = a["topk_idx"].shape
    return -(-num_tokens * top_k // a["w13"].shape[0]) or None


def _entries(a: Arguments) -> int | None:
    return int(a["scores"].shape[1]) or None


def _wider_than_a_chunk(a: Arguments) -> int | None:
    return int(a["scores"].shape[1]) if a["k"] > tiling.TOPK_LARGEST else None


DEVICE_THRESHOLDS: tuple[Threshold, ...] = (
    *_table(
        "programs of a restricted row",
        _RESTRICT,
        "rows",
        ((tiling.RESTRICT_FEW_ROWS, None), (1 << 62, None)),
        _tokens("logits"),
        _FEW_DRAWS,
    ),
    *_table(
        "list of best tokens",
        _TOP_TOKENS,
        "tokens asked for",
        (*tiling.TOP_TOKENS_LISTS, (1 << 62, None)),
        lambda a: int(a["num_tokens"]) if a["logits"].shape[0] > 0 else None,
    ),
    _wide_or_narrow("bf16 weight beside or before the product", _PLAIN, _plain()),
    *_table("tile of a bf16 product", _PLAIN, "rows", tiling.PLAIN_TILES, _plain(is_narrow=True)),
    *_table(
        "tile of a wide bf16 product",
        _PLAIN,
        "rows",
        tiling.WIDE_TILES,
        _plain(is_narrow=False, is_split=False),
        _LARGE_WEIGHTS,
    ),
    _wide_or_narrow("MXFP8 weight unpacked beside or before the product", _MXFP8, _mxfp8()),
    *_table("tile of an MXFP8 product", _MXFP8, "rows", tiling.MXFP8_TILES, _mxfp8(is_narrow=True, is_split=False)),
    *_table(
        "tile of an MXFP8 product in parts",
        _MXFP8,
        "rows",
        tiling.MXFP8_SPLIT_TILES,
        _mxfp8(is_narrow=True, is_split=True),
        _NOT_DEEP,
    ),
    *(
        threshold
        for name, function, quantity in (
            ("tile of a wide MXFP8 product in parts", _MXFP8, _mxfp8(is_narrow=False, is_split=True)),
            ("tile of a wide bf16 product in parts", _PLAIN, _plain(is_narrow=False, is_split=True)),
        )
        for threshold in _table(name, function, "rows", tiling.WIDE_SPLIT_TILES, quantity, _NOT_DEEP)
    ),
    *_table(
        "tile of a wide MXFP8 product",
        _MXFP8,
        "rows",
        tiling.WIDE_TILES,
        _mxfp8(is_narrow=False, is_split=False),
        _LARGE_WEIGHTS,
    ),
    *_table("tile of the mix logits", _HC_MIX, "rows", tiling.HC_MIX_TILES, _tokens("streams")),
    *_table(
        "tile of the experts",
        _EXPERTS,
        "average rows of an expert, rounded up",
        tiling.EXPERT_TILES,
        _average,
    ),
    Threshold(
        name="pairs sorted by one program",
        function=_ROUTE,
        value=f"(token, expert) pairs > ROUTE_ONE_PROGRAM ({tiling.ROUTE_ONE_PROGRAM})",
        sides=lambda a: (a["topk_idx"].numel() > tiling.ROUTE_ONE_PROGRAM,),
        device=CUDA,
    ),
    *_table(
        "rows that share unpacked index keys",
        _INDEX,
        "rows",
        tiling.INDEX_ROWS,
        lambda a: int(a["q"].shape[0]) if a["max_entries"] > 0 else None,
    ),
    Threshold(
        name="smallest block of a selection",
        function=_CHOOSE,
        value="entries of the longest context > 32",
        sides=_beyond(_entries, lambda _: 32),
        device=CUDA,
    ),
    Threshold(
        name="passes of a selection",
        function=_TOPK,
        value=f"entries of the longest context > TOPK_CHUNK ({tiling.TOPK_CHUNK})",
        sides=_beyond(_entries, lambda _: tiling.TOPK_CHUNK),
        device=CUDA,
        unreachable=_LONG_CONTEXT,
    ),
    Threshold(
        name="selections too large for the kernel",
        function=_TOPK,
        value=f"entries of the longest context > TOPK_CHUNK ({tiling.TOPK_CHUNK}) where k > TOPK_LARGEST",
        sides=_beyond(_wider_than_a_chunk, lambda _: tiling.TOPK_CHUNK),
        device=CUDA,
        unreachable=_NO_SUCH_K,
    ),
)
assert {limit for limit, _ in tiling.EXPERT_TILES} == {limit for limit, _ in tiling.EXPERT_DOWN_TILES}

_CALLER = "the functions that call it are listed"
_SHAPE = "formats, widths and the size of the cache, fixed at start-up"

# What only looks like a choice by the batch, or is listed under another function: file and function to the reason.
REVIEWED_DEVICE: Mapping[str, str] = {
    f"{_KERNELS}/linear/triton_kernel.py: tile_for": _CALLER,
    f"{_KERNELS}/linear/triton_kernel.py: split_width": "the shape of the weight",
    f"{_KERNELS}/linear/triton_kernel.py: _is_narrow": _CALLER,
    f"{_KERNELS}/linear/triton_kernel.py: _wide_tile": _CALLER,
    f"{_KERNELS}/sparse_attention/triton_kernel.py: sparse_attention_triton": "the table has one entry, for any batch",
    f"{_KERNELS}/sparse_attention/hopper_kernel.py: fits_hopper": _SHAPE,
    f"{_KERNELS}/engram_gate/tilelang_kernel.py: engram_gate_tilelang": "the width of a row",
    f"{_KERNELS}/peer_exchange/triton_kernel.py: peer_exchange_triton": "bytes are moved, whatever the step",
    f"{_KERNELS}/moe_experts/up_kernel.py: experts_up": "columns of a rank, fixed by the checkpoint and the ranks",
    f"{_KERNELS}/moe_experts/tilelang_kernel.py: moe_experts_tilelang": "a family, proven by its row tests alone",
}
