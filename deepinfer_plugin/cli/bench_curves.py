"""``bench prefill``, ``decode`` and ``sweep``: the two curves of an engine, as JSON, CSV and SVG."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_plugin import provenance
from deepinfer_plugin.bench import served
from deepinfer_plugin.bench.cases import Case, decode
from deepinfer_plugin.bench.curves import (
    DECODE,
    PREFILL,
    Assumption,
    Point,
    charts,
    parse_sizes,
    prefill_case,
    to_csv,
    to_text,
)
from deepinfer_plugin.bench.peer import run_side
from deepinfer_plugin.bench.plot import line_chart
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.model_folder import add_model, model_folder
from deepinfer_plugin.errors import EngineError, PlatformError, SettingError
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.settings import Accelerator, Settings

BATCH_TOKENS = "4096,8192,16384,32768,65536"
PREFILL_CONTEXT = 131072
REQUESTS = "1,2,4,8,16,32,64,96,128,192,256"
DECODE_CONTEXT = 8192
CPU_KV_CACHE_BYTES = 1 << 28
KINDS = {PREFILL: (PREFILL,), DECODE: (DECODE,), "sweep": (PREFILL, DECODE)}
HELP = {
    PREFILL: "prompt tokens/s against the time of a step",
    DECODE: "tokens/s against the speed of one user",
    "sweep": "both curves",
}


def add_parsers(kinds: Any) -> None:
    """Add the arguments of the three kinds."""
    for name, curves in KINDS.items():
        parser = kinds.add_parser(name, help=HELP[name])
        add_model(parser)
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for JSON, CSV, SVG and logs")
        parser.add_argument("--random-weights", action="store_true", help="leave the checkpoint's weights unread")
        parser.add_argument("--engine", type=_object, default={}, metavar="JSON", help="more arguments of vllm.LLM")
        parser.add_argument("--budget-s", type=float, default=1800.0, metavar="S", help="seconds of each engine")
        if PREFILL in curves:
            parser.add_argument(
                "--batch-tokens", default=BATCH_TOKENS, help=f"tokens of a step, one engine each ({BATCH_TOKENS})"
            )
            parser.add_argument("--context", type=int, default=PREFILL_CONTEXT, help="prompt tokens (default 131072)")
        if DECODE in curves:
            parser.add_argument("--requests", default=REQUESTS, help=f"requests decoded together ({REQUESTS})")
            parser.add_argument("--decode-context", type=int, default=DECODE_CONTEXT, help="(default 8192)")
            parser.add_argument("--new-tokens", type=int, default=65, help="of a request to --base-url (default 65)")
            parser.add_argument("--drafts", type=int, default=3, help="of the converted values (default 3)")
            parser.add_argument("--acceptance", type=float, default=0.75, help="of the converted values (default 0.75)")
            parser.add_argument(
                "--base-url", default=None, help="decode through this server, with vllm bench serve, not in an engine"
            )
            parser.add_argument("--served-model-name", default=None, help="its model name, with --base-url")
        parser.set_defaults(run=run, kind=name)


def run(arguments: argparse.Namespace) -> int:
    """Measure point after point; the files hold what is measured so far, so a stop keeps it."""
    curves = KINDS[arguments.kind]
    model = model_folder("bench", arguments.model)
    assumption = Assumption()
    points: list[Iterator[Point]] = []
    if PREFILL in curves:
        _require_at_least("--context", arguments.context, 1)
        points.append(_prefill(arguments, model, parse_sizes("--batch-tokens", arguments.batch_tokens)))
    if DECODE in curves:
        assumption = Assumption(drafts=arguments.drafts, acceptance=arguments.acceptance)
        _require_at_least("--decode-context", arguments.decode_context, 1)
        _require_at_least("--new-tokens", arguments.new_tokens, 2)
        if (arguments.base_url is None) is not (arguments.served_model_name is None):
            raise SettingError("bench: one of --base-url and --served-model-name is missing, expected both or neither")
        points.append(_decode(arguments, model, parse_sizes("--requests", arguments.requests)))
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"bench: --out is {arguments.out}, which cannot be made ({error}); choose another") from None
    found: list[Point] = []
    for curve in points:
        for point in curve:
            found.append(point)
            say(f"bench: {point.kind} {point.batch}: {point.tokens_per_s:,.1f} tokens/s")
            _write(arguments, model, found, assumption)
    if not found:
        raise EngineError(
            f"bench: no case could be run, expected one at least; the reasons are above, logs in {arguments.out}"
        )
    say(to_text(found, assumption))
    return 0


def _object(text: str) -> dict[str, Any]:
    """A JSON object of the command line; argparse reports the ``ValueError``."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _require_at_least(option: str, value: int, low: int) -> None:
    if value < low:
        raise SettingError(f"bench: {option} is {value}, expected {low} or more")


def _prefill(arguments: argparse.Namespace, model: Path, sizes: tuple[int, ...]) -> Iterator[Point]:
    """One engine per size: the tokens of a step are fixed when it starts."""
    for size in sizes:
        case = prefill_case(size, arguments.context)
        engine = {**_engine(arguments), "max_num_batched_tokens": size, "max_num_seqs": min(size, 16)}
        yield from _timed(arguments, model, {case: size}, engine, f"prefill-{size}.log")


def _decode(arguments: argparse.Namespace, model: Path, sizes: tuple[int, ...]) -> Iterator[Point]:
    """One engine for all sizes, or a running server."""
    context = arguments.decode_context
    if arguments.base_url is None:
        cases = {decode(size, context): size for size in sizes}
        yield from _timed(arguments, model, cases, _engine(arguments), "decode.log")
        return
    for size in sizes:
        say(f"bench: {size} users of {arguments.base_url} …")
        name, new_tokens = arguments.served_model_name, arguments.new_tokens
        yield served.measure(arguments.base_url, model, name, size, context, new_tokens, arguments.out)


def _timed(
    arguments: argparse.Namespace, model: Path, cases: dict[Case, int], engine: dict[str, Any], log: str
) -> Iterator[Point]:
    """The points of one engine; a case that it could not run is named with the reason."""
    say(f"bench: engine for {', '.join(case.name for case in cases)} …")
    path = arguments.out / log
    figures = run_side("ours", model, list(cases), {**engine, **arguments.engine}, path, arguments.budget_s)
    for case, size in cases.items():
        if case.name in figures.tokens_per_s:
            yield Point.from_rate(case, size, figures.tokens_per_s[case.name])
        else:
            say(f"bench: {case.name} was not run: {figures.not_run[case.name]}")


def _engine(arguments: argparse.Namespace) -> dict[str, Any]:
    decision = current_decision()
    if decision is None:
        raise PlatformError("bench: DEEPINFER_DISABLE is 1, expected 0; unset it")
    is_cpu = decision.accelerator is Accelerator.CPU
    return {
        "load_format": "dummy" if arguments.random_weights else "auto",
        **({"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES} if is_cpu else {}),
    }


def _write(arguments: argparse.Namespace, model: Path, points: list[Point], assumption: Assumption) -> None:
    """The files of all points so far."""
    out: Path = arguments.out
    record = {
        "model": str(model),
        "random_weights": arguments.random_weights,
        "served_by": getattr(arguments, "base_url", None) or "vllm.LLM in a process of its own",
        "assumption": assumption.to_json(),
        "points": [point.to_row(assumption) for point in points],
        "versions": provenance.versions(),
        "settings": Settings.from_envs().to_json(),
    }
    (out / "curves.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "curves.csv").write_text(to_csv(points, assumption), encoding="utf-8")
    for kind, (x_title, y_title, series) in charts(points, assumption).items():
        chart = line_chart(f"{kind}, {model.name}", x_title, y_title, series)
        (out / f"{kind}.svg").write_text(chart, encoding="utf-8")
