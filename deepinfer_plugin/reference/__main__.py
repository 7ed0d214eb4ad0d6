"""Write a small checkpoint: ``python -m deepinfer_plugin.reference tiny 0 DIR``; prints its content hash."""

from __future__ import annotations

import argparse

from deepinfer_plugin.reference.tiny import write_checkpoint
from deepinfer_plugin.reference.tiny_config import SIZES


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_plugin.reference", description=__doc__)
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("seed", type=int)
    parser.add_argument("out", help="folder, made if it is missing")
    parser.add_argument("--swiglu-limit", type=float, default=None, help="0.5 makes the clamps fire")
    arguments = parser.parse_args()
    print(write_checkpoint(arguments.name, arguments.seed, arguments.out, arguments.swiglu_limit))


if __name__ == "__main__":
    main()
