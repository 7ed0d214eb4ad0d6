"""``report``: what a run shows, computed from its folder alone, as JSON, Markdown and one HTML page."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_evals import intervals
from deepinfer_evals.benchmark import REFERENCE_NOTE, Question
from deepinfer_evals.canonical import hash_of
from deepinfer_evals.endpoint import Answer
from deepinfer_evals.graders.verdict import Outcome, Verdict
from deepinfer_evals.grading import stored_verdict
from deepinfer_evals.journal import read_lines
from deepinfer_evals.judge import Judgements
from deepinfer_evals.manifest import Manifest, grader_hash
from deepinfer_evals.markdown import markdown
from deepinfer_evals.page import page
from deepinfer_evals.run_folder import Key, RunFolder, write_json, write_text
from deepinfer_evals.tasks import benchmark_named
from deepinfer_plugin.cli.console import say

FORMAT = 1
NUM_BINS = 24


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("report", help="statistics and pages of a run, computed again from its answers")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    folder = RunFolder(arguments.run_folder)
    say(write_reports(folder, report_of(folder)))
    return 0


def write_reports(folder: RunFolder, report: Mapping[str, Any]) -> str:
    """Write the three forms; returns one line on the score and where they are."""
    if report["score"] is None:
        return "report: no answer is finished yet, nothing to report"
    write_json(folder.path / "report.json", report)
    write_text(folder.path / "report.md", markdown(report))
    write_text(folder.path / "report.html", page(report))
    score = report["score"]
    return (
        f"Pass@1 {100 * score['mean']:.2f} % (95 % interval {100 * score['low']:.2f} to {100 * score['high']:.2f}, "
        f"{report['num_questions']} questions), {report['truncated']['count']} of {report['num_answers']} truncated: "
        f"{folder.path / 'report.html'}"
    )


def verdicts_of(
    folder: RunFolder, manifest: Manifest, questions: Mapping[str, Question], answers: Mapping[Key, Answer]
) -> dict[Key, Verdict]:
    """The verdict of each answer, by question and epoch."""
    grader = str(manifest.hashed["grader"]["name"])
    judge = manifest.hashed["grader"]["judge"]
    judgements = None if judge is None else Judgements(judge, read_lines(folder.judgements_path))
    return {key: stored_verdict(grader, questions[key[0]], answers[key], judgements) for key in sorted(answers)}


def results_of(verdicts: Mapping[Key, Verdict]) -> dict[str, dict[int, bool]]:
    """Right or not, by question and epoch."""
    results: dict[str, dict[int, bool]] = {}
    for (question, epoch), verdict in sorted(verdicts.items()):
        results.setdefault(question, {})[epoch] = verdict.outcome is Outcome.CORRECT
    return results


def report_of(folder: RunFolder) -> dict[str, Any]:
    """Everything that the pages show.

    Raises:
        InputError: this is no run folder, or a file in it was changed.
    """
    manifest = folder.manifest()
    benchmark = benchmark_named(str(manifest.hashed["benchmark"]["name"]))
    answers = folder.answers()
    questions = folder.questions_of(answers)
    verdicts = verdicts_of(folder, manifest, questions, answers)
    results = results_of(verdicts)
    scores = intervals.epoch_scores(results)
    outcomes = Counter(str(verdict.outcome) for verdict in verdicts.values())
    counts = [len(epochs) for epochs in results.values()]
    return {
        "format": FORMAT,
        "benchmark": benchmark.name,
        "manifest_hash": manifest.content_hash,
        "answers_hash": hash_of([[*key, answers[key].witness["all"]] for key in sorted(answers)]),
        "grader_is_the_runs": grader_hash(benchmark.grader) == manifest.hashed["grader"]["source"],
        "num_questions": len(results),
        "num_questions_of_benchmark": benchmark.num_questions,
        "num_answers": len(answers),
        "answers_per_question": [min(counts, default=0), max(counts, default=0)],
        "score": _interval(results),
        "epochs": {"scores": {str(epoch): score for epoch, score in scores.items()},
                   "standard_deviation": intervals.spread(list(scores.values()))},
        "pass_at_k": _pass_at_k(results, max(counts, default=0)),
        "outcomes": {str(outcome): outcomes.get(str(outcome), 0) for outcome in Outcome},
        "truncated": _truncated(verdicts),
        "lengths": _lengths(answers),
        "references": [{"label": r.label, "percent": r.percent} for r in benchmark.references],
        "reference_note": REFERENCE_NOTE,
        "note": benchmark.note,
        "setting": _setting(manifest),
        "questions": _question_rows(results, verdicts, answers),
    }  # fmt: skip


def _interval(results: intervals.Results) -> dict[str, float] | None:
    if not results:
        return None
    found = intervals.bootstrap_mean(intervals.question_means(results))
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _pass_at_k(results: intervals.Results, most: int) -> list[dict[str, Any]]:
    ks = sorted({1, most, *(2**power for power in range(1, 12) if 2**power <= most)}) if most else []
    rows = []
    for k in ks:
        value, count = intervals.pass_at_k_of(results, k)
        rows.append({"k": k, "value": value, "num_questions": count})
    return rows


def _truncated(verdicts: Mapping[Key, Verdict]) -> dict[str, int]:
    cut = [verdict for verdict in verdicts.values() if verdict.outcome is Outcome.TRUNCATED]
    return {"count": len(cut), "right_before_the_cut": sum(v.if_whole is Outcome.CORRECT for v in cut)}


def _lengths(answers: Mapping[Key, Answer]) -> dict[str, Any] | None:
    """Distribution of tokens per answer; ``bins`` are [low, high, whole, truncated], the last includes its end."""
    if not answers:
        return None
    sizes = np.array([len(answer.token_ids) for answer in answers.values()])
    is_cut = np.array([answer.is_truncated for answer in answers.values()])
    edges = np.unique(np.linspace(0, max(int(sizes.max()), 1), NUM_BINS + 1).round().astype(int))
    whole, cut = (np.histogram(sizes[mask], edges)[0] for mask in (~is_cut, is_cut))
    return {
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "max": int(sizes.max()),
        "total": int(sizes.sum()),
        "bins": [
            [int(low), int(high), int(w), int(c)]
            for low, high, w, c in zip(edges[:-1], edges[1:], whole, cut, strict=True)
        ],
    }


def _setting(manifest: Manifest) -> dict[str, Any]:
    server = manifest.hashed["server"]
    return {
        "model": server.get("model"),
        "versions": server.get("versions") or server.get("version"),
        "machine": server.get("machine"),
        "batch_invariant": server.get("batch_invariant"),
        "checkpoint": hash_of(server["checkpoint"]) if server.get("checkpoint") else None,
        "certificate": server.get("certificate"),
        "sampling": manifest.hashed["sampling"],
        "seeds": manifest.hashed["seeds"],
        "dataset": {name: manifest.hashed["dataset"][name] for name in ("source", "revision")},
        "judge": manifest.hashed["grader"]["judge"],
    }


def _question_rows(
    results: intervals.Results, verdicts: Mapping[Key, Verdict], answers: Mapping[Key, Answer]
) -> list[dict[str, Any]]:
    return [
        {
            "id": question,
            "right": sum(epochs.values()),
            "answers": [
                {
                    "epoch": epoch,
                    "outcome": str(verdicts[question, epoch].outcome),
                    "found": verdicts[question, epoch].found,
                    "tokens": len(answers[question, epoch].token_ids),
                    "witness": answers[question, epoch].witness["all"],
                }
                for epoch in epochs
            ],
        }
        for question, epochs in results.items()
    ]
