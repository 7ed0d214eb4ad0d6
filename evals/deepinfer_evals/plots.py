"""Plots as SVG text: score with its interval, a heat map of questions, a histogram of lengths. No scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 760
COLOURS = {
    "correct": "#1a7f37",
    "wrong": "#cf222e",
    "no answer": "#8c959f",
    "ambiguous": "#bf8700",
    "truncated": "#8250df",
    "unjudged": "#0969da",
}
CELL = 12
MAX_COLUMNS = 60


def score_plot(score: Mapping[str, float], references: Sequence[Mapping[str, Any]]) -> str:
    """Pass@1 with its interval and the published figures, on 0 to 100 percent."""
    rows = [("this run", 100 * score["mean"], 100 * score["low"], 100 * score["high"])]
    rows += [(str(row["label"]), float(row["percent"]), None, None) for row in references]  # type: ignore[misc]
    left, step = 260, 30
    parts = []
    for tick in range(0, 101, 20):
        x = left + (WIDTH - left - 60) * tick / 100
        parts.append(f'<line x1="{x:.1f}" y1="10" x2="{x:.1f}" y2="{step * len(rows) + 10}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{step * len(rows) + 26}" text-anchor="middle">{tick}</text>')
    for index, (label, value, low, high) in enumerate(rows):
        y = 10 + step * index + step / 2
        at = _scale(value, left)
        parts.append(f'<text x="{left - 10}" y="{y + 5}" text-anchor="end">{escape(label)}</text>')
        if low is not None and high is not None:
            parts.append(
                f'<line x1="{_scale(low, left):.1f}" y1="{y}" x2="{_scale(high, left):.1f}" y2="{y}" class="bar"/>'
            )
        shape = (
            f'<circle cx="{at:.1f}" cy="{y}" r="6" class="run"/>'
            if low is not None
            else f'<rect x="{at - 5:.1f}" y="{y - 5}" width="10" height="10" class="reference"/>'
        )
        parts.append(shape)
        parts.append(f'<text x="{WIDTH - 50}" y="{y + 5}">{value:.1f}</text>')
    return _svg(parts, step * len(rows) + 34, "Pass@1 in percent: this run with its 95 % interval, and the references")


def heat_map(questions: Sequence[Mapping[str, Any]]) -> str:
    """One column for each question, one cell for each epoch, coloured by verdict; long benchmarks take several rows."""
    epochs = max((answer["epoch"] for question in questions for answer in question["answers"]), default=1)
    block = CELL * epochs + 8
    parts = []
    for index, question in enumerate(questions):
        x = CELL * (index % MAX_COLUMNS)
        top = block * (index // MAX_COLUMNS)
        for answer in question["answers"]:
            y = top + CELL * (answer["epoch"] - 1)
            text = f"{question['id']}, epoch {answer['epoch']}: {answer['outcome']}"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{COLOURS[answer["outcome"]]}">'
                f"<title>{escape(text)}</title></rect>"
            )
    rows = (len(questions) + MAX_COLUMNS - 1) // MAX_COLUMNS
    return _svg(parts, block * rows, "Verdict of each question (columns) and epoch (rows)")


def length_histogram(bins: Sequence[Sequence[int]]) -> str:
    """Answers by number of tokens; those that the length limit cut are stacked on the whole ones."""
    height, bottom = 180, 200
    most = max((whole + cut for _, _, whole, cut in bins), default=1) or 1
    width = (WIDTH - 60) / max(len(bins), 1)
    parts = [
        f'<text x="0" y="16">{most}</text>',
        f'<line x1="50" y1="{bottom}" x2="{WIDTH}" y2="{bottom}" class="grid"/>',
    ]
    for index, (low, high, whole, cut) in enumerate(bins):
        x, y = 50 + width * index, float(bottom)
        for count, colour, word in ((whole, "#0969da", "whole"), (cut, COLOURS["truncated"], "truncated")):
            size = height * count / most
            y -= size
            if count:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{size:.1f}" fill="{colour}">'
                    f"<title>{low} to {high} tokens: {count} {word}</title></rect>"
                )
    if bins:
        parts.append(f'<text x="50" y="{bottom + 18}">{bins[0][0]}</text>')
        parts.append(f'<text x="{WIDTH}" y="{bottom + 18}" text-anchor="end">{bins[-1][1]} tokens</text>')
    return _svg(parts, bottom + 24, "Tokens per answer")


def legend(outcomes: Mapping[str, int]) -> str:
    """Colours of the heat map with counts, as HTML."""
    return " ".join(
        f'<span class="key"><i style="background:{COLOURS[name]}"></i>{escape(name)} {count}</span>'
        for name, count in outcomes.items()
    )


def _scale(percent: float, left: int) -> float:
    return left + (WIDTH - left - 60) * percent / 100


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "".join(parts)
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">'
        f"<title>{escape(label)}</title>{body}</svg>"
    )
