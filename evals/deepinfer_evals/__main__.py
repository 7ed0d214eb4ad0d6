"""``python -m deepinfer_evals COMMAND``.

Exit code 0: done; 1: answers differ, are missing, or a check failed; 2: one line on standard error says what is wrong;
130: interrupted, finished answers are kept.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin import __version__
from deepinfer_plugin.errors import SettingError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage is in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: arguments: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command."""
    words = sys.argv[1:] if arguments is None else arguments
    kept = "; finished answers are kept, the same command continues" if words[:1] == ["run"] else ""
    try:
        return _run(words)
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped{kept}", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    from deepinfer_evals import compare, doctor, report, run_command, verify  # seconds in which Ctrl-C may come

    parser = _Parser(prog="python -m deepinfer_evals", description="Scores that can be run again, to the bit.")
    parser.add_argument("--version", action="version", version=f"deepinfer-plugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (run_command, report, compare, verify, doctor):
        command.add_parser(commands)
    border = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:border])
    parsed.vllm = words[border + 1 :]
    if parsed.vllm and getattr(parsed, "model", None) is None:
        raise SettingError(f"arguments: {parsed.vllm[0]} after -- is for a server of our own; name it with --model")
    return int(parsed.run(parsed))


def _interrupt(number: int, frame: object) -> None:
    """Being asked to end is handled as Ctrl-C is, by whoever handles that now: a running event loop, or Python."""
    del number, frame
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
