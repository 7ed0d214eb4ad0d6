"""``python -m deepinfer_determinism COMMAND``.

Exit code 0: no difference; 1: a difference; 2: one line on standard error says what is wrong; 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys

from deepinfer_determinism import certificate, certify, draft_matrix_command, locate, replay, report, run_command
from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin import __version__, interruption


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_determinism", description="What may change an answer, what may not, and the proof."
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-plugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (run_command, draft_matrix_command, certify, locate, replay, certificate, report):
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    interruption.listen()
    sys.exit(main())
