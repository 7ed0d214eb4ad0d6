"""``status``: what is on, what is off and why, on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.platforms.detect import platform_class
from deepinfer_plugin.status import Status


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("status", help="what is on, off and why, on this machine")
    parser.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAGS", help="flags of vllm serve, to see them beside the variables"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 0, or 1 where a start of vLLM would be refused."""
    status = Status.from_process(_engine_arguments(arguments.engine_flags) if arguments.engine_flags else None)
    say(json.dumps(status.to_json(), indent=1) if arguments.json else status.to_text())
    return 1 if status.problems else 0


def _engine_arguments(flags: list[str]) -> Any:
    """The flags as vLLM reads them; it ends the program with its own message where it cannot."""
    platform_class()  # before torch, Triton and vLLM are imported
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="status … --"))
    named = ["--model=.", *flags]  # without a model vLLM would look for its default one in the Hub
    return EngineArgs.from_cli_args(parser.parse_args(named))
