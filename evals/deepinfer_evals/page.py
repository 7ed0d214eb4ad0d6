"""The report as one HTML page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deepinfer_evals.markdown import length_line, notes, percent, points
from deepinfer_evals.plots import heat_map, legend, length_histogram, score_plot

STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border: 1px solid var(--line); padding: .2rem .6rem; text-align: left; }
code, pre { overflow-wrap: anywhere; white-space: pre-wrap; } svg { max-width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; } .grid { stroke: var(--line); }
.bar { stroke: #0969da; stroke-width: 3; } .run { fill: #0969da; } .reference { fill: #bf8700; }
.key { margin-right: 1rem; white-space: nowrap; } .key i { display: inline-block; width: .8rem; height: .8rem; }
"""


def page(report: Mapping[str, Any]) -> str:
    """The page of a report with at least one answer."""
    score = report["score"]
    title = f"{report['benchmark']}: Pass@1 {percent(score['mean'])}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>95 % interval {percent(score['low'])} to {percent(score['high'])}, bootstrap over "
        f"{report['num_questions']} questions; {report['num_answers']} answers.</p>",
        *(f"<p><b>{escape(note)}</b></p>" for note in notes(report)),
        "<h2>Score and references</h2>",
        score_plot(score, report["references"]),
        f"<p>{escape(report['reference_note'])}</p>",
        "<h2>Questions and epochs</h2>",
        f"<p>{legend(report['outcomes'])}</p>",
        heat_map(report["questions"]),
        "<h2>Pass@k and epochs</h2>",
        _table(
            ["k", "pass@k", "questions"],
            [[str(row["k"]), percent(row["value"]), str(row["num_questions"])] for row in report["pass_at_k"]],
        ),
        _table(["epoch", "score"], [[epoch, percent(value)] for epoch, value in report["epochs"]["scores"].items()]),
        _deviation(report),
        "<h2>Lengths</h2>",
        f"<p>{escape(length_line(report))} Blue: whole answers, violet: cut by the length limit.</p>",
        length_histogram(report["lengths"]["bins"]),
        "<h2>What it depends on</h2>",
        f"<p>Manifest <code>{report['manifest_hash']}</code>, answers <code>{report['answers_hash']}</code></p>",
        f"<pre>{escape(json.dumps(report['setting'], indent=1, ensure_ascii=False))}</pre>",
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _deviation(report: Mapping[str, Any]) -> str:
    value = report["epochs"]["standard_deviation"]
    return f"<p>Standard deviation between epochs: {points(value)}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
