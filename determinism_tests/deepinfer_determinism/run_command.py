"""``run``: the harness as one command: pytest on this package, then where the result lies."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_determinism import choices
from deepinfer_determinism.results import read_result
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import EngineError, SettingError

PASSED, FAILED = 0, 1
INTERRUPTED = 2  # exit code of pytest
TESTS = (
    "test_operations.py",
    "test_operation_mutants.py",
    "test_relations.py",
    "test_engine_mutants.py",
    "test_thresholds.py",
)


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("run", help="run the harness on this machine")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", dest="depth", action="store_const", const="quick", help="minutes (default)")
    depth.add_argument("--full", dest="depth", action="store_const", const="full", help="up to an hour")
    parser.add_argument("--checkpoint", default="nano:0", help="nano:SEED, tiny:SEED or a folder (default nano:0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--workload-seed", type=int, default=0, help="chooses the workload (default 0)")
    parser.add_argument("--jobs", type=int, default=0, help="engines at once (default 2 on the cpu, 5 on cuda)")
    parser.add_argument("--relation", action="append", default=[], help="run this relation only; repeatable")
    parser.add_argument("--schedules", type=Path, default=None, help="store every schedule here, for locate and replay")
    parser.add_argument("--out", type=Path, default=Path("determinism.json"), help="default determinism.json")
    parser.set_defaults(run=run, depth="quick")


def run(arguments: argparse.Namespace) -> int:
    """Run pytest in a child; 0 where everything passed, 1 where something differs or was missed."""
    try:
        choices.check_device(arguments.device)
        choices.check_checkpoint(arguments.checkpoint)
        choices.check_relations(arguments.relation)
        choices.check_jobs(arguments.jobs)
        choices.check_result("--out", arguments.out)
    except SettingError as error:
        raise SettingError(f"run: {error}") from None
    before = arguments.out.stat().st_mtime_ns if arguments.out.exists() else None
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "deepinfer_determinism.options", "--import-mode=importlib"]
    command += [str(folder / name) for name in TESTS]
    command += [f"--depth={arguments.depth}", f"--checkpoint={arguments.checkpoint}", f"--device={arguments.device}"]
    command += [f"--workload-seed={arguments.workload_seed}", f"--result={arguments.out.resolve()}"]
    command += [f"--jobs={arguments.jobs}"]
    command += [f"--relation={name}" for name in arguments.relation]
    command += [] if arguments.schedules is None else [f"--schedules={arguments.schedules.resolve()}"]
    code = run_apart(command)
    is_new = arguments.out.exists() and arguments.out.stat().st_mtime_ns != before
    if not is_new:
        raise EngineError(f"run: pytest ended with exit code {code} and wrote no result; its output is above")
    result = read_result(arguments.out)
    say(f"{result.rows_compared} rows compared in {result.seconds:.0f} s; result in {arguments.out}")
    if code == INTERRUPTED or not result.is_complete:
        kept = f"{len(result.operations)} operations and {len(result.relations)} relations"
        say(f"interrupted: {kept} are kept in {arguments.out}")
        return 130
    return PASSED if code == 0 and result.is_passed else FAILED


def run_apart(command: Sequence[str]) -> int:
    """Run a command that Ctrl-C reaches once, through us, and return its exit code.

    After the first it stops its engines and writes what it has; the second ends it and all its children at once.

    Raises:
        KeyboardInterrupt: at the second Ctrl-C.
    """
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
