"""The server of a run: one that is there, or one of our own for the time of the run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals.endpoint import Endpoint, RefusedError
from deepinfer_evals.manifest import server_facts
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.errors import InputError, SettingError

START_S = 3600.0  # the released checkpoint is 160 GB
SERVED_NAME = "evaluated"
FLAGS = ("--reasoning-parser=deepseek_v41",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to ask."""

    base_url: str
    model: str = ""
    api_key: str = ""

    def endpoint(self, *, timeout_s: float | None = None, slots: int = 64) -> Endpoint:
        """A client of it."""
        return Endpoint(self.base_url, self.model, api_key=self.api_key, timeout_s=timeout_s, slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a server before the first question.

    Attributes:
        target: with the model's name filled in.
        has_witness: it hashes ids and log-probabilities itself.
        hashed, recorded: see ``manifest.server_facts``.
    """

    target: Target
    has_witness: bool
    hashed: dict[str, Any]
    recorded: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which server to ask."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", default=None, help="a running OpenAI-compatible server, http://HOST:PORT")
    where.add_argument("--model", type=Path, default=None, metavar="DIR", help="start vllm serve on this checkpoint")
    parser.add_argument("--model-name", default="", help="which of the server's models (default: its only one)")
    parser.add_argument("--api-key-file", type=Path, default=None, help="file that holds the server's key")
    parser.epilog = "What follows -- goes to vllm serve; with --model only."


def read_key(path: Path | None) -> str:
    """The key in a file; "" without one.

    Raises:
        SettingError: the file cannot be read.
    """
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingError(f"server: key file {path} cannot be read ({error}), expected a file with one key") from None


@contextmanager
def serving(arguments: argparse.Namespace, log: Path) -> Iterator[Target]:
    """The server that the arguments name; our own ends with the context.

    Raises:
        EngineError: our own server did not start.
    """
    key = read_key(arguments.api_key_file)
    if arguments.base_url is not None:
        yield Target(base_url=arguments.base_url, model=arguments.model_name, api_key=key)
        return
    if not arguments.model.is_dir():
        raise InputError(f"server: --model is {arguments.model}, which is no folder, expected that of a checkpoint")
    name = arguments.model_name or SERVED_NAME
    flags = (*FLAGS, f"--served-model-name={name}", *arguments.vllm)
    log.parent.mkdir(parents=True, exist_ok=True)
    with Server(arguments.model.resolve(), log, free_port(), flags) as server:
        say(f"server: {arguments.model} at {server.base_url}, log {log}")
        say(f"server: healthy after {server.wait_until_healthy(START_S):.1f} s")
        try:
            yield Target(base_url=server.base_url, model=name, api_key=key)
        except Exception:
            server.check_alive()  # if it died, its log says more than the client
            raise


async def inspect_server(target: Target, body: dict[str, Any]) -> Facts:
    """Ask a server what it is, and for one token.

    Args:
        target: where; an empty model name means the only one it serves.
        body: sampling parameters of the run, so that a server which refuses one does so now.

    Raises:
        EngineError: it cannot be reached or refuses.
        SettingError: the model is not one that it serves.
    """
    async with target.endpoint() as endpoint:
        models = await endpoint.models()
        model = target.model or (models[0] if len(models) == 1 else "")
        if model not in models:
            raise SettingError(
                f"server: --model-name is {target.model!r}, expected one that {endpoint.base_url} serves: "
                f"{', '.join(models) or 'it lists none'}"
            )
        endpoint.model = model
        say("server: waiting for its provenance (the first time it reads every byte of the checkpoint)")
        provenance, version = await endpoint.provenance(), await endpoint.version()
        try:
            await endpoint.ask("one", {**body, "max_tokens": 1}, 0)
        except RefusedError:
            endpoint.has_witness = False
            await endpoint.ask("one", {**body, "max_tokens": 1}, 0)
        hashed, recorded = server_facts(provenance, model, version)
        return Facts(
            target=Target(base_url=target.base_url, model=model, api_key=target.api_key),
            has_witness=endpoint.has_witness,
            hashed=hashed,
            recorded={**recorded, "base_url": endpoint.base_url, "witness": endpoint.has_witness},
        )
