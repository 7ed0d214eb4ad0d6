"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    """The report of ``report.report_of`` with at least one answer."""
    score = report["score"]
    low, high = report["answers_per_question"]
    deviation = report["epochs"]["standard_deviation"]
    lines = [
        f"# {report['benchmark']}: Pass@1 {percent(score['mean'])}",
        "",
        f"95 % interval {percent(score['low'])} to {percent(score['high'])} (bootstrap over "
        f"{report['num_questions']} questions), {report['num_answers']} answers, "
        f"{low if low == high else f'{low} to {high}'} per question.",
        "",
        *notes(report),
        "",
        "| reference | Pass@1 | this run minus it |",
        "|---|---|---|",
        *(
            f"| {row['label']} | {row['percent']:.1f} % | {100 * score['mean'] - row['percent']:+.1f} |"
            for row in report["references"]
        ),
        "",
        report["reference_note"],
        "",
        "| verdict | answers |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in report["outcomes"].items()),
        "",
        "| k | pass@k | questions |",
        "|---|---|---|",
        *(f"| {row['k']} | {percent(row['value'])} | {row['num_questions']} |" for row in report["pass_at_k"]),
        "",
        "| epoch | score |",
        "|---|---|",
        *(f"| {epoch} | {percent(value)} |" for epoch, value in report["epochs"]["scores"].items()),
        "",
        f"Standard deviation between epochs: {points(deviation)}.",
        "",
        length_line(report),
        "",
        f"Manifest `{report['manifest_hash']}`, answers `{report['answers_hash']}`.",
        "",
    ]
    return "\n".join(lines)


def notes(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know before the figures."""
    cut, found = report["truncated"], []
    if report["num_questions"] < report["num_questions_of_benchmark"]:
        found.append(
            f"Only {report['num_questions']} of the benchmark's {report['num_questions_of_benchmark']} questions."
        )
    if cut["count"]:
        found.append(
            f"{cut['count']} answers were cut by the length limit and count as wrong; {cut['right_before_the_cut']} of "
            "them held the right answer before the cut."
        )
    if report["outcomes"]["unjudged"]:
        found.append(f"{report['outcomes']['unjudged']} answers have no clear judgement and count as wrong.")
    if not report["grader_is_the_runs"]:
        found.append("The grader is not the one of the run: these verdicts are those of the grader installed now.")
    return found + ([report["note"]] if report["note"] else [])


def length_line(report: Mapping[str, Any]) -> str:
    """The lengths in one sentence."""
    sizes = report["lengths"]
    return (
        f"Tokens per answer: mean {sizes['mean']:.0f}, median {sizes['median']:.0f}, 90 % up to {sizes['p90']:.0f}, "
        f"longest {sizes['max']}; {sizes['total']} in all."
    )


def points(deviation: float | None) -> str:
    """A spread of shares as text."""
    return "one epoch only" if deviation is None else f"{100 * deviation:.2f} points"


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.2f} %"
