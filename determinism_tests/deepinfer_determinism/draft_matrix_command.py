"""``drafts``: the matrix of drafts as one command: engines in children, every row compared, a table of cells."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from deepinfer_determinism import choices
from deepinfer_determinism.draft_cells import MatrixResult, compare_matrix
from deepinfer_determinism.draft_matrix import KINDS, SIZES, matrix_schedules
from deepinfer_determinism.engine import Children, ScheduleResult
from deepinfer_determinism.harness import NUM_CHILDREN
from deepinfer_determinism.workload import Sizes, Workload
from deepinfer_plugin.cli.console import say

PASSED, FAILED = 0, 1


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("drafts", help="drafts and schedules of verification against none, on the CPU")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", dest="depth", action="store_const", const="quick", help="a minute (default)")
    depth.add_argument("--full", dest="depth", action="store_const", const="full", help="all, more than 20,000 tokens")
    parser.add_argument("--workload-seed", type=int, default=0, help="chooses the prompts (default 0)")
    parser.add_argument("--jobs", type=int, default=0, help="engines at once (default: 1 quick, 2 full)")
    parser.add_argument("--out", type=Path, default=Path("drafts.json"), help="default drafts.json")
    parser.set_defaults(run=run, depth="quick")


def run(arguments: argparse.Namespace) -> int:
    """Run the matrix; 0 where no bit differs and every cell was exercised, else 1."""
    choices.check_result("drafts: --out", arguments.out)
    choices.check_jobs(arguments.jobs)
    begin_s = time.monotonic()
    result = compare_matrix(run_matrix(arguments.depth, arguments.workload_seed, arguments.jobs), arguments.depth)
    arguments.out.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    for line in _table(result, arguments.depth):
        say(line)
    faults = result.faults()
    for fault in faults:
        say(fault)
    seconds = time.monotonic() - begin_s
    say(f"{result.rows} generated tokens with drafts, {result.differences} rows differ, {seconds:.0f} s")
    return FAILED if faults else PASSED


def run_matrix(depth: str, workload_seed: int, num_children: int = 0) -> dict[str, ScheduleResult]:
    """All engines of a depth, on a small checkpoint whose own drafts are right and wrong by turns."""
    from deepinfer_plugin.reference.tiny import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="deepinfer-matrix-") as folder:
        write_checkpoint("nano", 0, Path(folder), drafts_agree=True)
        workload = Workload.build(Sizes.from_model_dir(Path(folder)), workload_seed)
        count = num_children or (1 if depth == "quick" else NUM_CHILDREN["cpu"])  # each pays for vLLM's start
        with Children("cpu", count) as children:
            return children.run(matrix_schedules(folder, workload, depth))


def _table(result: MatrixResult, depth: str) -> list[str]:
    """A line a combination: rows and differences of its cells."""
    columns = [f"{circumstance} {kind}" for circumstance in SIZES[depth].circumstances for kind in KINDS]
    lines = ["rows/differing: " + ", ".join(columns)]
    for combination in SIZES[depth].combinations:
        cells = [f"{cell.rows}/{cell.differences}" for cell in result.cells if cell.combination == combination]
        lines.append(f"{combination.name}: " + " ".join(cells))
    return lines
