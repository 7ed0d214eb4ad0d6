"""``bench peer``: the speed of our model beside vLLM's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deepinfer_plugin import provenance
from deepinfer_plugin.bench.cases import CASES, Figures, select
from deepinfer_plugin.bench.peer import SIDES, run_side, table
from deepinfer_plugin.bench.plot import ratio_chart
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "bench",
        help="time our model beside vLLM's own, random weights",
        epilog=f"cases: {', '.join(c.name for c in CASES)}",
    )
    parser.add_argument("what", choices=("peer",), help="peer: our model and vLLM's own model, alternated")
    parser.add_argument(
        "--config", type=Path, required=True, metavar="DIR", help="folder with config.json and tokenizer"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for results.json, ratio.svg, logs"
    )
    parser.add_argument("--case", action="append", metavar="NAME", help="only cases whose name starts so; repeatable")
    parser.add_argument("--side", choices=SIDES, default=None, help="one side only")
    parser.add_argument("--rounds", type=int, default=1, help="how often both sides run (default 1)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="arguments of vllm.LLM for both")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Time, then write and print the table."""
    cases = select(arguments.case)
    if not (arguments.config / "config.json").is_file():
        raise SettingError(f"bench: --config is {arguments.config}, which has no config.json; name a checkpoint folder")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    rounds: list[Figures] = []
    for number in range(arguments.rounds):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        for side in order if arguments.side is None else (arguments.side,):
            say(f"bench: round {number + 1}, {side} …")
            log = out / f"{side}-{number}.log"
            rounds.append(run_side(side, arguments.config, cases, arguments.engine, log))
            record = {"versions": provenance.versions(), "rounds": [figures.to_json() for figures in rounds]}
            (out / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    say(table(rounds))
    sides = {figures.side: figures.tokens_per_s for figures in rounds}
    if set(sides) == set(SIDES):
        ratios = {name: rate / sides["vllm"][name] for name, rate in sides["ours"].items() if name in sides["vllm"]}
        chart = ratio_chart(ratios, "tokens/s, ours / vLLM's own")
        (out / "ratio.svg").write_text(chart, encoding="utf-8")
    return 0
