"""The launchers of the Triton kernels: both sides of every choice, and no choice that is not listed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepinfer_kernels
from deepinfer_determinism.coverage import observe
from deepinfer_determinism.thresholds_device import DEVICE_THRESHOLDS, REVIEWED_DEVICE
from deepinfer_kernels import tiling
from deepinfer_kernels.tiling import MatmulTile

KERNELS = Path(deepinfer_kernels.__path__[0])
CHOOSERS = {"tile_for", "from_table", "_is_narrow", "_wide_tile"}
# Words that stand for rows, pairs or entries of the batch, and every comparison with a constant of tiling.py.
QUANTITY = re.compile(r"\b(num_(tokens|rows|reqs|pairs|entries|chunks|out)|average|max_entries)\b|\.shape\[|tiling\.")
SUFFIXES = ("_kernel.py", "_kernel_fp32.py", "triton_candidates.py")


def choices(folder: Path) -> Iterator[tuple[str, str]]:
    """Place and text of what may follow the batch: a comparison with anything but 0, a look-up in a table."""
    for path in sorted(folder.rglob("*.py")):
        if path.name.endswith(SUFFIXES) and not path.name.startswith(("test_", "bench_")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from _choices_of(tree, str(path.relative_to(folder.parent)), "")


def _choices_of(node: ast.AST, module: str, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name = function
        if isinstance(child, ast.FunctionDef):
            if any("jit" in ast.unparse(decorator) for decorator in child.decorator_list):
                continue  # on the device: a mask or a loop over the rows that a program owns
            name = child.name
        is_call = isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in CHOOSERS
        is_about_empty = isinstance(child, ast.Compare) and ast.unparse(child.comparators[0]) == "0"
        if is_call or (isinstance(child, ast.Compare) and not is_about_empty):
            text = ast.unparse(child)
            if is_call or QUANTITY.search(text):
                yield f"{module}: {function}", text
        yield from _choices_of(child, module, name)


def test_every_choice_of_a_launcher_is_listed() -> None:
    listed = {threshold.where for threshold in DEVICE_THRESHOLDS} | set(REVIEWED_DEVICE)
    found = list(choices(KERNELS))
    assert sorted(f"{where}: {text}" for where, text in found if where not in listed) == []
    assert sorted(listed - {where for where, _ in found} - INDIRECT) == []  # no entry outlives its choice


# ``min`` and ``max`` of ``_choose`` are no comparison; it is listed all the same.
INDIRECT = {"deepinfer_kernels/indexer_topk/triton_kernel.py: _choose"}


@pytest.mark.parametrize(
    "body",
    [
        "    return 1 if x.shape[0] > 32 else 2",
        "    return tile_for(tiling.NEW_TILES, anything)",
        "    num_pairs = x.numel()\n    if num_pairs <= tiling.LIMIT:\n        return 1\n    return 2",
    ],
)
def test_a_choice_that_nobody_listed_is_found(body: str, tmp_path: Path) -> None:
    folder = tmp_path / "deepinfer_kernels" / "new"
    folder.mkdir(parents=True)
    (folder / "triton_kernel.py").write_text(f"def new_triton(x, anything):\n{body}\n", encoding="utf-8")
    (where, _), *_ = choices(tmp_path / "deepinfer_kernels")
    assert where == "deepinfer_kernels/new/triton_kernel.py: new_triton"


class Launches:
    """Stands in for a kernel or a launcher, and keeps what it was asked for."""

    def __init__(self, name: str, kept: list[Any]) -> None:
        self._name, self._kept = name, kept

    def __getitem__(self, grid: Any) -> Launches:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tiles = [value for value in (*args, *kwargs.values()) if isinstance(value, MatmulTile)]
        self._kept.append((self._name, tiles, {key: value for key, value in kwargs.items() if key.isupper()}))
        return mock.MagicMock()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plain(rows: int, outputs: int = 256, depth: int = 256) -> tuple[Any, ...]:
    return meta(rows, depth), meta(outputs, depth), torch.bfloat16


def mxfp8(rows: int, outputs: int = 256, depth: int = 256) -> tuple[Any, ...]:
    weight, scale = meta(outputs, depth, dtype=torch.uint8), meta(outputs, depth // 32, dtype=torch.uint8)
    return meta(rows, depth), weight, scale, 1, torch.bfloat16


def experts(average: int) -> tuple[Any, ...]:
    indices, weights = meta(average, 8, dtype=torch.int32), meta(average, 8, dtype=torch.float32)
    return meta(average, 64), indices, weights, *(meta(8, 8, 8, dtype=torch.uint8) for _ in range(4)), None


def index(rows: int) -> tuple[Any, ...]:
    integers = meta(rows, dtype=torch.int32)
    cache, table = meta(4, 32, 20, dtype=torch.uint8), meta(1, 4, dtype=torch.int32)
    return meta(rows, 2, 32), meta(rows, 2), cache, table, integers, integers, 5


LARGE = 1 << 15  # outputs of a weight that is not cut in parts
ARGUMENTS: dict[str, tuple[tuple[str, ...], Callable[[int], tuple[Any, ...]], dict[str, Any]]] = {
    "bf16 weight": (("plain_narrow", "wide_matmul"), plain, {}),
    "tile of a bf16": (("plain_narrow",), plain, {}),
    "tile of a wide bf16": (("wide_matmul",), lambda rows: plain(rows, LARGE), {}),
    "MXFP8 weight": (("mxfp8_narrow_parts", "wide_matmul", "unpack_weight"), mxfp8, {}),
    "tile of an MXFP8 product above": (("mxfp8_narrow_parts",), mxfp8, {}),
    "tile of an MXFP8 product in parts": (("mxfp8_narrow_parts",), lambda rows: mxfp8(rows, depth=4096), {}),
    "tile of a wide bf16 product in parts": (("wide_matmul",), lambda rows: plain(rows, depth=4096), {}),
    "tile of a wide MXFP8 product in parts": (
        ("wide_matmul", "unpack_weight"),
        lambda rows: mxfp8(rows, depth=4096),
        {},
    ),
    "tile of a wide MXFP8": (("wide_matmul", "unpack_weight"), lambda rows: mxfp8(rows, LARGE), {}),
    "tile of the mix": (
        ("_hc_mix_split_kernel", "_hc_mix_parts_kernel", "_hc_mix_sum_kernel"),
        lambda rows: (meta(rows, 4, 256), meta(24, 1024, dtype=torch.float32), 1e-6),
        {},
    ),
    "tile of the experts": (
        ("route_pairs", "experts_up", "experts_down", "prepare_rows"),
        experts,
        {"limit": 10.0, "quantize_input": True},
    ),
    "pairs sorted": (
        ("_route_small_kernel", "_rank_kernel", "_tiles_kernel", "_place_kernel"),
        lambda pairs: (meta(pairs, 1, dtype=torch.int32), 8, 16),
        {},
    ),
    "programs of a restricted row": (
        ("restrict_few_rows_triton", "restrict_rows_triton"),
        lambda rows: (meta(rows, 5, dtype=torch.float32), *(meta(rows, dtype=torch.float32) for _ in range(3))),
        {},
    ),
    "list of best tokens": (
        ("_best_of_groups_kernel", "_best_of_rows_kernel", "top_tokens_reference"),
        lambda num_tokens: (meta(2, 200, dtype=torch.float32), num_tokens),
        {},
    ),
    "rows that share": (("_indexer_logits_kernel",), index, {"round_bf16": True}),
    "smallest block": (("_topk_kernel",), lambda entries: (meta(2, entries, dtype=torch.float32), None, 8, True), {}),
    "passes of": (("_topk_kernel",), lambda entries: (meta(2, entries, dtype=torch.float32), 512), {}),
    "selections too large": (
        ("_topk_kernel", "topk_indices_reference"),
        lambda entries: (meta(2, entries, dtype=torch.float32), tiling.TOPK_LARGEST + 1),
        {},
    ),
}
LIMITS = {
    "bf16 weight beside or before the product": 1024,
    "MXFP8 weight unpacked beside or before the product": 1024,
    "pairs sorted by one program": tiling.ROUTE_ONE_PROGRAM,
    "smallest block of a selection": 32,
    "passes of a selection": tiling.TOPK_CHUNK,
    "selections too large for the kernel": tiling.TOPK_CHUNK,
}


@pytest.mark.parametrize("threshold", DEVICE_THRESHOLDS, ids=lambda threshold: threshold.name)
def test_the_launcher_chooses_another_way_on_each_side(threshold: Any) -> None:
    limit = LIMITS.get(threshold.name) or int(threshold.name.rpartition(" ")[2])
    prefix = max((key for key in ARGUMENTS if threshold.name.startswith(key)), key=len)
    stand_ins, arguments, options = ARGUMENTS[prefix]
    module, _, function = threshold.function.partition(":")
    chosen: list[list[Any]] = []
    with observe(deepinfer_kernels.__name__) as reached:
        for size in (limit, limit + 1):
            kept: list[Any] = []
            with ExitStack() as stack:
                for name in stand_ins:
                    stand_in = Launches(name, kept)
                    stack.enter_context(mock.patch.object(importlib.import_module(module), name, stand_in))
                getattr(importlib.import_module(module), function)(*arguments(size), **options)
            chosen.append(kept)
    assert reached[threshold.name] == [1, 1]
    assert chosen[0]
    assert chosen[0] != chosen[1]
