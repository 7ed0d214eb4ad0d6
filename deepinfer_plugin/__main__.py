"""``python -m deepinfer_plugin COMMAND``. Exit code 0: done; 2: one line on standard error says what is wrong."""

from __future__ import annotations

import argparse
import sys

from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin import __version__, interruption
from deepinfer_plugin.cli import bench, demo, offline, score, sizing, status, tiny


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_plugin", description="DeepSeek-V4.1-Flash with vLLM: programs around the plugin."
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-plugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (status, tiny, score, offline, demo, bench, sizing):
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
