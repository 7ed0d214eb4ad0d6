"""The bench of exchanges runs on two processes over gloo, and leaves the environment as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import distributed, multiprocessing

from deepinfer_plugin.bench import exchanges


def one_rank(rank: int, folder: str) -> None:
    """A process of the bench; the first one writes down what it found."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    before = dict(os.environ)
    found: Any = exchanges.measure((1, 64), repeats=2)
    assert dict(os.environ) == before
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def test_two_processes_time_both_kinds_of_communicator(tmp_path: Path) -> None:
    multiprocessing.spawn(one_rank, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [(row["exchange"], row["rows"]) for row in found] == [
        ("gather_columns", 1),
        ("merge_rows", 1),
        ("gather_columns", 64),
        ("merge_rows", 64),
    ]
    assert all(row["pinned_us"] > 0 < row["free_us"] for row in found)
