"""``status``: what is on, what is off and why, on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.status import Status


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("status", help="what is on, off and why, on this machine")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 0, or 1 where a start of vLLM would be refused."""
    status = Status.from_process()
    say(json.dumps(status.to_json(), indent=1) if arguments.json else status.to_text())
    return 1 if status.problems else 0
