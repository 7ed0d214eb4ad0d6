"""``tiny``: a small random checkpoint in the released format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.reference.tiny_config import SIZES


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("tiny", help="write a small random checkpoint in the released format")
    sizes = "its size (default tiny); slice: layers of the released width, 2.9 GB, for a GPU"
    parser.add_argument("--config", choices=SIZES, default="tiny", help=sizes)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument("--swiglu-limit", type=float, default=None, help="other clamp than the released one, for tests")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint and print its content hash."""
    out: Path = arguments.out
    if arguments.seed < 0:
        raise SettingError(f"tiny: --seed is {arguments.seed}, expected 0 or more")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingError(f"tiny: --out is {out}, which is not empty, expected a new or empty folder; choose another")
    from deepinfer_plugin.reference.tiny import write_checkpoint

    try:
        digest = write_checkpoint(arguments.config, arguments.seed, out, arguments.swiglu_limit)
    except OSError as error:
        raise SettingError(f"tiny: --out is {out}, which cannot be written ({error}); choose another") from None
    say(f"{out}: {arguments.config}, seed {arguments.seed}, content hash {digest}")
    return 0
