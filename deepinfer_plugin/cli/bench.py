"""``bench``: the speed of our model beside vLLM's own (``peer``), and its curves (``bench_curves``)."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from deepinfer_plugin import provenance
from deepinfer_plugin.bench.cases import CASES, Figures, select
from deepinfer_plugin.bench.peer import SIDES, ratios, run_side, table
from deepinfer_plugin.bench.plot import ratio_chart
from deepinfer_plugin.cli import bench_curves
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError

RESULTS = "results.json"


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("bench", help="speed of our model: beside vLLM's own, and its two curves")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    peer = kinds.add_parser(
        "peer",
        help="our model and vLLM's own model, alternated, random weights",
        epilog=f"cases: {', '.join(c.name for c in CASES)}",
    )
    peer.add_argument("--config", type=Path, required=True, metavar="DIR", help="folder with config.json and tokenizer")
    peer.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for results.json, table.md, ratio.svg, logs; earlier rounds there are kept",
    )
    peer.add_argument("--case", action="append", metavar="NAME", help="only cases whose name starts so; repeatable")
    peer.add_argument("--side", choices=SIDES, default=None, help="one side only")
    peer.add_argument("--rounds", type=int, default=1, help="how often both sides run (default 1)")
    peer.add_argument(
        "--budget-s", type=float, default=1800.0, metavar="S", help="seconds of each side in a round, start included"
    )
    peer.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="arguments of vllm.LLM for both")
    peer.set_defaults(run=run)
    bench_curves.add_parsers(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Time, then write and print the table; rounds that --out holds of the same configuration are kept and count."""
    cases = select(arguments.case)
    if not (arguments.config / "config.json").is_file():
        raise SettingError(f"bench: --config is {arguments.config}, which has no config.json; name a checkpoint folder")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256((arguments.config / "config.json").read_bytes()).hexdigest()
    rounds = _earlier_rounds(out, digest)
    try:
        for number in range(arguments.rounds):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            for side in order if arguments.side is None else (arguments.side,):
                log = out / f"{side}-{len(rounds)}.log"
                say(f"bench: round {number + 1}, {side} …; log: {log}")
                rounds.append(run_side(side, arguments.config, cases, arguments.engine, log, arguments.budget_s))
                _write(out, digest, rounds)
    except KeyboardInterrupt:
        say(f"bench: interrupted; what was timed is in {out / RESULTS}")
        return 130
    say(table(rounds))
    return 0


def _earlier_rounds(out: Path, digest: str) -> list[Figures]:
    """Rounds of an earlier call on the same configuration.

    Raises:
        SettingError: the folder holds results of another configuration.
    """
    path = out / RESULTS
    if not path.is_file():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["config_sha256"] != digest:
        raise SettingError(f"bench: --out is {out}, which holds results of another config.json; name another folder")
    return [Figures.from_json(values) for values in record["rounds"]]


def _write(out: Path, digest: str, rounds: list[Figures]) -> None:
    record = {
        "versions": provenance.versions(),
        "config_sha256": digest,
        "rounds": [figures.to_json() for figures in rounds],
    }
    (out / RESULTS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "table.md").write_text(table(rounds) + "\n", encoding="utf-8")
    found = ratios(rounds)
    if found:
        (out / "ratio.svg").write_text(ratio_chart(found, "tokens/s, ours / vLLM's own"), encoding="utf-8")
