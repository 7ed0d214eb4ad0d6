"""``certify``: the black-box part against any OpenAI-compatible server, bounded in requests and time.

Exit codes: 0 no difference (as far as a limit of requests or time let it come), 1 differences, 2 nothing could be
compared or the server failed before the end, 130 interrupted without a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deepinfer_determinism.client import Answer, Ask, BudgetSpentError, Endpoint, EndpointError
from deepinfer_determinism.endpoint_relations import PROBE_WORDS, RELATIONS, Session
from deepinfer_determinism.results import DIFFERENT, EQUAL, NOT_APPLICABLE, RelationResult, RunResult
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError, SettingError

KIND, FORMAT = "certify", 1
NO_DIFFERENCE, DIFFERENCES, COULD_NOT_CHECK, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = "certify.json"


@dataclass(slots=True)
class Certification:
    """What one run has found so far; ``value`` is what the file holds after every relation."""

    settings: dict[str, Any]
    relations: list[RelationResult] = field(default_factory=list)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    stopped: str = ""  # why it ended early; empty where every relation ran
    has_failed: bool = False  # it ended early because of the server
    seconds: float = 0.0

    @property
    def run_result(self) -> RunResult:
        """The relations as a run of the harness, for certificate and report."""
        return RunResult(
            depth="endpoint",
            device=f"server {self.settings['base_url']}",
            checkpoint=self.settings["model"],
            workload_seed=self.settings["seed"],
            seconds=self.seconds,
            is_complete=not self.stopped,
            relations=tuple(self.relations),
            notes={
                "server version": str(self.server.get("version", "unknown")),
                **{name: str(count) for name, count in self.counts.items()},
                **({"stopped": self.stopped} if self.stopped else {}),
            },
        )

    def write(self, path: Path) -> None:
        """Write whole or not at all."""
        value = {
            "kind": KIND,
            "format": FORMAT,
            "settings": self.settings,
            "server": dict(self.server),
            "answers": {name: answer.to_json() for name, answer in self.answers.items()},
            "run": self.run_result.to_json(),
        }
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise SettingError(f"certify: --out is {path}, which cannot be written ({error}); choose another") from None


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("certify", help="compare the answers of any OpenAI-compatible server with each other")
    parser.add_argument("--base-url", required=True, help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name the server knows the model by")
    parser.add_argument("--api-key", default=None, help="sent as bearer token (default: none)")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="what is asked")
    parser.add_argument("--requests-limit", type=int, default=5000, help="most requests sent (default 5000)")
    parser.add_argument("--time-limit-s", type=float, default=1800.0, help="longest run (default 1800)")
    parser.add_argument("--copies", type=int, default=100, help="concurrent copies of one request (default 100)")
    parser.add_argument("--concurrency", type=int, default=1000, help="most requests at once (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the probes (default 0)")
    parser.add_argument("--only", action="append", choices=tuple(RELATIONS), help="run this relation only; repeatable")
    parser.add_argument("--compare", type=Path, default=None, help="result file of a run before the server's restart")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help=f"result file (default {DEFAULT_OUT})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Certify a server; see the module for exit codes."""
    _check_arguments(arguments)
    earlier, settings = None, _settings(arguments)
    if arguments.compare is not None:
        earlier, settings["seed"], settings["max_words"] = read_earlier(arguments.compare, settings)
    found = Certification(settings=settings)
    begin_s = time.monotonic()
    try:
        asyncio.run(_certify(found, arguments, earlier, begin_s))
    except KeyboardInterrupt:
        found.stopped = "interrupted"
    except (EndpointError, BudgetSpentError, TimeoutError) as error:
        if not found.relations:
            raise EndpointError(str(error) or _too_slow(arguments)) from None
        found.stopped, found.has_failed = str(error) or _too_slow(arguments), isinstance(error, EndpointError)
    found.seconds = time.monotonic() - begin_s
    found.write(arguments.out)
    return _conclude(found, arguments.out)


async def _certify(
    found: Certification, arguments: argparse.Namespace, earlier: Mapping[str, Answer] | None, begin_s: float
) -> None:
    endpoint = Endpoint(
        arguments.base_url,
        arguments.model,
        api_key=arguments.api_key,
        use_chat=arguments.endpoint == "chat",
        max_requests=arguments.requests_limit,
        max_connections=arguments.concurrency,
        timeout_s=arguments.time_limit_s,
    )
    async with asyncio.timeout(arguments.time_limit_s), endpoint:
        found.server = await endpoint.check()
        if found.settings["max_words"] is None:
            found.settings["max_words"] = await _longest_prompt(endpoint)
        session = Session(
            endpoint=endpoint,
            seed=found.settings["seed"],
            max_words=found.settings["max_words"],
            num_copies=arguments.copies,
            earlier=earlier,
        )
        for name, check in RELATIONS.items():
            if arguments.only and name not in (*arguments.only, "repeat"):
                continue
            found.relations.append(await _alone(check, session))
            found.answers = session.alone
            found.counts = {
                "requests": endpoint.num_requests,
                "answers": session.num_answers,
                "requests sent again": endpoint.num_retries,
            }
            found.seconds = time.monotonic() - begin_s
            found.write(arguments.out)
            say(_line(found.relations[-1]))


async def _alone(check: Callable[[Session], Any], session: Session) -> RelationResult:
    """One relation; of several requests that failed together the first error is raised alone."""
    try:
        result: RelationResult = await check(session)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return result


async def _longest_prompt(endpoint: Endpoint) -> int:
    """Most words of a probe that the server's context holds, found by halving."""
    words = max(PROBE_WORDS)
    while True:
        session = Session(endpoint=endpoint, seed=0, max_words=words, num_copies=0)
        longest = max((ask.prompt for ask in session.probes.values()), key=len)
        try:
            await endpoint.complete(Ask(prompt=f"{longest} {longest}", max_tokens=1, logprobs=0))
        except EndpointError:
            if words == 1:
                raise
            words //= 2
        else:
            return words


def read_earlier(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Answer], int, int]:
    """Answers, seed and longest prompt of an earlier run on the same model and endpoint.

    Raises:
        InputError: the file cannot be read, is no result of ``certify``, or asked something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["kind"] != KIND or value["format"] != FORMAT:
            raise ValueError(f"kind {value['kind']!r}, format {value['format']!r}")
        answers = {str(name): Answer.from_json(answer) for name, answer in value["answers"].items()}
        before = value["settings"]
        found = answers, int(before["seed"]), int(before["max_words"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"certify: --compare is {path}, which is no result of certify ({type(error).__name__}: {error}); "
            "name the file that the earlier run wrote"
        ) from None
    for name in ("model", "endpoint"):
        if before.get(name) != settings[name]:
            raise InputError(
                f"certify: --compare is {path}, whose {name} is {before.get(name)!r}, expected {settings[name]!r}; "
                "compare runs of one model"
            )
    if not answers:
        raise InputError(f"certify: --compare is {path}, which holds no answers; name a run that got further")
    return found


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "base_url": arguments.base_url.rstrip("/").removesuffix("/v1"),
        "model": arguments.model,
        "endpoint": arguments.endpoint,
        "seed": arguments.seed,
        "copies": arguments.copies,
        "concurrency": arguments.concurrency,
        "requests_limit": arguments.requests_limit,
        "time_limit_s": arguments.time_limit_s,
        "max_words": None,
    }


def _check_arguments(arguments: argparse.Namespace) -> None:
    for name, least in (("requests_limit", 1), ("time_limit_s", 1.0), ("copies", 2), ("concurrency", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if not value >= least:
            raise SettingError(f"certify: --{name.replace('_', '-')} is {value}, expected at least {least}")
    if not _is_address(arguments.base_url):
        raise SettingError(f"certify: --base-url is {arguments.base_url!r}, expected http://HOST:PORT or https://…")
    if arguments.out.is_dir():
        raise SettingError(f"certify: --out is {arguments.out}, a folder, expected a file; name one in it")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, or half an IPv6 address
        return False


def _too_slow(arguments: argparse.Namespace) -> str:
    return f"certify: --time-limit-s {arguments.time_limit_s:g} is over; the server was slower, raise it"


def _line(result: RelationResult) -> str:
    seen = ", ".join(f"{name} {count}" for name, count in result.mechanisms.items())
    reason = f"  {result.not_applicable}" if result.not_applicable else f"  {result.rows_compared} rows, {seen}"
    return f"{result.relation:15s} {result.outcome:14s}{reason}  ({result.seconds:.1f} s)"


def _conclude(found: Certification, out: Path) -> int:
    """The last lines, and the exit code."""
    rows = sum(result.rows_compared for result in found.relations)
    if found.stopped:
        say(f"stopped early ({found.stopped}); {len(found.relations)} relations are kept in {out}")
    different = next((result for result in found.relations if result.outcome == DIFFERENT), None)
    if different is not None:
        first = different.first_difference
        assert first is not None
        say(f"DIFFERENT: relation {different.relation}, request {first.request!r}, output token {first.position}")
        say(f"  got  {first.got}")
        say(f"  want {first.want}")
        say(f"{sum(result.differences for result in found.relations)} of {rows} rows differ; result in {out}")
        return DIFFERENCES
    not_shown = [result.relation for result in found.relations if result.outcome not in (EQUAL, NOT_APPLICABLE)]
    if not_shown:
        say(f"not exercised, so nothing is shown of it: {', '.join(not_shown)}")
    if rows == 0:
        return INTERRUPTED if found.stopped == "interrupted" else COULD_NOT_CHECK
    say(f"no difference in {rows} rows of {found.counts.get('answers', 0)} answers; result in {out}")
    if found.stopped == "interrupted":
        return INTERRUPTED
    return COULD_NOT_CHECK if found.has_failed else NO_DIFFERENCE
