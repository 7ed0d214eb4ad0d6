"""Both sides of every threshold were reached, and no branch on a batch quantity is missing from the list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepinfer_kernels
import deepinfer_plugin
from deepinfer_determinism import workload
from deepinfer_determinism.harness import Harness
from deepinfer_determinism.thresholds import REVIEWED, THRESHOLDS, Threshold
from deepinfer_kernels import tiling

# Words that stand for a number of rows, requests or entries of the batch in our kernels and layers.
BATCH_QUANTITY = re.compile(
    r"\b(num_tokens|num_rows|num_reqs|num_full|num_entries|num_tiles|num_chosen|max_entries|max_seq_len|counts?|numel)\b"
    r"|\.shape\[0\]|\blen\(|\.any\(\)|\.max\(\)|\bnum_top\b|\bnum_score_blocks\b"
)
FOLDERS = (
    Path(deepinfer_kernels.__path__[0]),
    Path(deepinfer_plugin.__path__[0]) / "model",
    Path(deepinfer_plugin.__path__[0]) / "sampling",
    Path(deepinfer_plugin.__path__[0]) / "worker",
    Path(deepinfer_plugin.__path__[0]) / "cache",
    Path(deepinfer_plugin.__path__[0]) / "draft",
    Path(deepinfer_plugin.__path__[0]) / "replay",
)
# "interpreted": tests of Triton kernels, in processes of their own
OTHER_DEVICES = (
    *("_kernel", "triton_", "interpreted", "bench", "test_", "conftest", "testing"),
    *("front_end", "middleware", "faults"),
)


def test_the_set_reaches_both_sides(threshold_here: Threshold, harness: Harness, has_whole_set: bool) -> None:
    if not has_whole_set:
        pytest.skip("coverage is that of all relations and operations, and only some were selected")
    (row,) = [row for row in harness.coverage() if row.name == threshold_here.name]
    assert row.is_covered, f"{row.name} ({row.value}): {row.below} below, {row.above} above; not exercised"


def test_every_branch_on_a_batch_quantity_is_listed() -> None:
    listed = {threshold.where for threshold in THRESHOLDS} | set(REVIEWED)
    found = {where for where, _ in branches()}
    assert sorted(f"{where}: {text}" for where, text in branches() if where not in listed) == []
    assert sorted(where for where in REVIEWED if where not in found) == []  # no entry outlives its branch


def test_the_workload_knows_the_tiles_of_the_code() -> None:
    assert (workload.ROW_TILE, workload.KEY_TILE) == (tiling.REFERENCE_ROW_TILE, tiling.REFERENCE_KEY_TILE)


def branches() -> Iterator[tuple[str, str]]:
    """Place and text of every condition, ``min`` and ``max`` on a batch quantity in the code of the CPU lane."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            if any(word in path.name for word in OTHER_DEVICES):
                continue
            module = str(
                path.relative_to(folder.parents[0] if folder.name == "deepinfer_kernels" else folder.parents[1])
            )
            yield from _branches_of(ast.parse(path.read_text(encoding="utf-8")), module, "")


def _branches_of(node: ast.AST, module: str, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
        text = _choice(child)
        if text is not None and BATCH_QUANTITY.search(text):
            yield f"{module}: {function}", text
        yield from _branches_of(child, module, name)


def _choice(node: ast.AST) -> str | None:
    """The condition of a branch that does more than raise, a loop over chunks, or a call of ``min`` or ``max``."""
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
        return None
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return ast.unparse(node.test)
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range":
        is_chunked = len(node.iter.args) == 3  # the length of a chunk may follow anything
        return f"for {ast.unparse(node.iter)} of num_rows" if is_chunked else None
    is_bound = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    return ast.unparse(node) if is_bound else None
