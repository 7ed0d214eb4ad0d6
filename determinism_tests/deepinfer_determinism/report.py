"""One self-contained HTML page drawn from a run or a certificate: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from deepinfer_determinism import certificate
from deepinfer_determinism.results import (
    DIFFERENT,
    EQUAL,
    NOT_APPLICABLE,
    NOT_EXERCISED,
    CoverageRow,
    MutantResult,
    RelationResult,
    RunResult,
)
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError

CLASSES = {EQUAL: "good", DIFFERENT: "bad", NOT_EXERCISED: "warn", NOT_APPLICABLE: "none"}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2da44e44; --bad: #cf222e66; --warn: #bf870066; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 2rem; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top; }
td.good { background: var(--good); } td.bad { background: var(--bad); } td.warn { background: var(--warn); }
td.none { opacity: .6; } small { display: block; opacity: .75; } code { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.bar { display: flex; width: 14rem; height: 1rem; border: 1px solid var(--line); }
.bar i { display: block; background: #0969da88; } .bar b { display: block; background: #8250df88; }
"""


def page(run: RunResult, proof: Mapping[str, Any] | None = None) -> str:
    """The page of a run; ``proof`` is the certificate that holds it, where there is one."""
    passed = "passed" if run.is_passed else "did not pass"
    if run.depth == "endpoint" and run.is_complete and all(r.outcome != DIFFERENT for r in run.relations):
        passed = "showed no difference"
    parts = [
        f"<h1>Determinism: the {escape(run.depth)} run {passed}</h1>",
        _facts(run, proof),
        "<h2>Relations by configuration</h2>",
        _relations(run.relations),
        "<h2>First differences</h2>",
        _first_differences(run.relations),
        _operations(run),
        "<h2>Coverage of thresholds</h2>",
        _coverage(run.coverage),
        "<h2>Mutants</h2>",
        _mutants(run.mutants),
        _failures(run.failures),
        _environment(proof),
    ]
    head = f'<meta charset="utf-8"><title>Determinism report</title><style>{STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width">'
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}{viewport}</head>\n<body>\n{body}\n</body></html>\n'


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("report", help="draw an HTML page from a run or a certificate")
    parser.add_argument("file", type=Path, metavar="FILE", help="result file of run or certify, or a certificate")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default report.html")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    proof = certificate.read(arguments.file) if _is_certificate(arguments.file) else None
    run = RunResult.from_json(proof["run"]) if proof is not None else certificate.read_run(arguments.file)
    try:
        arguments.out.write_text(page(run, proof), encoding="utf-8")
    except OSError as error:
        raise SettingError(f"report: --out is {arguments.out}, which cannot be written ({error})") from None
    say(f"report: {arguments.out}")
    return 0


def _is_certificate(path: Path) -> bool:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong is said by the reader of runs
    return isinstance(value, dict) and value.get("kind") == certificate.KIND


def _facts(run: RunResult, proof: Mapping[str, Any] | None) -> str:
    summary = certificate.Summary.of(run)
    lines = {
        "Compared": f"{summary.rows_compared} rows, {summary.differences} differ",
        "Relations": f"{summary.relations_equal} equal, {summary.relations_different} different, "
        f"{summary.relations_not_exercised} not exercised, {summary.relations_not_applicable} not applicable",
        "Mutants": f"{summary.mutants_killed} of {summary.mutants} caught",
        "Thresholds": f"{summary.thresholds_covered} of {summary.thresholds} reached on both sides",
        "Where": f"{run.checkpoint} on {run.device}, workload seed {run.workload_seed}, {run.seconds:.0f} s",
        "Complete": "yes" if run.is_complete else "no, it was stopped: what it holds is still true",
        **run.notes,
        **({"Certificate": str(proof["content_hash"])} if proof is not None else {}),
    }
    return _table([], [[f"<b>{escape(name)}</b>", escape(text)] for name, text in lines.items()])


def _relations(relations: Iterable[RelationResult]) -> str:
    results = list(relations)
    configurations = sorted({result.configuration for result in results})
    rows = []
    for relation in dict.fromkeys(result.relation for result in results):
        cells = [f"<b>{escape(relation)}</b>"]
        for configuration in configurations:
            here = [r for r in results if r.relation == relation and r.configuration == configuration]
            cells.append("".join(_relation_cell(result) for result in here))
        rows.append(cells)
    return _table(["relation", *configurations], rows)


def _relation_cell(result: RelationResult) -> str:
    """The words of one cell; its colour is set by ``_table`` from the first word."""
    seen = ", ".join(f"{name} {count}" for name, count in result.mechanisms.items())
    detail = result.not_applicable or f"{result.rows_compared} rows, {result.differences} differ; {seen}"
    return f"{escape(result.outcome)}<small>{escape(detail)}</small>"


def _first_differences(relations: Iterable[RelationResult]) -> str:
    rows = [
        [
            escape(result.relation),
            escape(first.request),
            str(first.position),
            f"<code>{escape(first.got)}</code>",
            f"<code>{escape(first.want)}</code>",
            "<br>".join(escape(path) for path in result.schedules),
        ]
        for result in relations
        if (first := result.first_difference) is not None
    ]
    return _table(["relation", "request", "position", "got", "want", "schedules"], rows) if rows else "<p>None.</p>"


def _operations(run: RunResult) -> str:
    if not run.operations:
        return ""
    rows = [
        [escape(o.operation), _verdict(o.differences == 0), f"{o.rows_compared} rows in {o.batches} batches",
         escape(o.message)]
        for o in run.operations
    ]  # fmt: skip
    return "<h2>Operations, every row alone</h2>" + _table(["operation", "outcome", "compared", "message"], rows)


def _coverage(rows: Iterable[CoverageRow]) -> str:
    cells = []
    for row in rows:
        share = 100.0 * row.below / max(row.below + row.above, 1)
        bar = f'<div class="bar"><i style="width:{share:.1f}%"></i><b style="width:{100 - share:.1f}%"></b></div>'
        is_empty = row.below + row.above == 0
        cells.append(
            [
                escape(row.name),
                _verdict(row.is_covered),
                "" if is_empty else bar,
                f"{row.below} below, {row.above} at or above",
                f"{escape(row.value)}<small>{escape(row.where)} {escape(row.unreachable)}</small>",
            ]
        )
    return _table(["threshold", "outcome", "sides", "times", "what"], cells) if cells else "<p>None recorded.</p>"


def _mutants(mutants: Iterable[MutantResult]) -> str:
    rows = [
        [escape(m.name), _verdict(m.is_killed), escape(m.caught_by or "missed"), f"ran {m.ran} times", escape(m.what)]
        for m in mutants
    ]
    return _table(["mutant", "outcome", "caught by", "proof", "what was broken"], rows) if rows else "<p>None run.</p>"


def _failures(failures: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in failures)
    return f"<h2>Other failures</h2><ul>{lines}</ul>" if lines else ""


def _environment(proof: Mapping[str, Any] | None) -> str:
    if proof is None:
        return ""
    text = json.dumps(proof["environment"], indent=1, ensure_ascii=False)
    return f"<h2>Environment</h2><pre>{escape(text)}</pre>"


def _verdict(is_good: bool) -> str:
    return "yes" if is_good else "NO"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already; heads are escaped."""
    colours = {**CLASSES, "yes": "good", "NO": "bad"}
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = [f"<tr>{head}</tr>"] if heads else []
    for row in rows:
        cells = ((colours.get(cell.partition("<")[0], ""), cell) for cell in row)
        lines.append("<tr>" + "".join(f'<td class="{name}">{cell}</td>' for name, cell in cells) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
