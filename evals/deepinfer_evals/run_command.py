"""``run``: ask a benchmark, keep every answer, and report; continues where it was stopped."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

from deepinfer_evals import data, selection, serving, settings
from deepinfer_evals.benchmark import Benchmark
from deepinfer_evals.journal import Journal, read_lines
from deepinfer_evals.judge import Judgements, reach
from deepinfer_evals.report import report_of, write_reports
from deepinfer_evals.run_folder import RunFolder
from deepinfer_evals.tasks import BENCHMARKS
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError

INCOMPLETE = 1
SHOWN_ERRORS = 3
PACKAGES = ("inspect_ai", "datasets")


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("run", help="ask a benchmark; run it again to continue")
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS), help="what to ask")
    parser.add_argument("--out", type=Path, default=None, metavar="RUN", help="folder of the run (default: its name)")
    serving.add_arguments(parser)
    selection.add_arguments(parser)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight (default 64)")
    settings.add_sampling(parser)
    settings.add_data(parser)
    settings.add_judge(parser)
    parser.add_argument(
        "--certificate", type=Path, default=None, help="determinism certificate of the server's machine"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run a session; 0 where every selected sample is finished and judged, else 1."""
    _require_packages()
    benchmark = BENCHMARKS[arguments.benchmark]
    folder = RunFolder(arguments.out or Path(f"run-{benchmark.name}"))
    settings.check_concurrency(arguments.concurrency)
    sampling, judge = settings.sampling_of(arguments), settings.judge_of(benchmark, arguments)
    rows = data.load(benchmark, revision=_revision(folder, arguments), data_dir=arguments.data_dir)
    questions = benchmark.questions(rows.rows)
    selected = selection.select(questions, arguments)
    _say_size(benchmark, len(questions), len(selected), arguments.epochs)
    reachable = settings.judge_endpoint(arguments, judge)
    if reachable is not None:
        asyncio.run(reach(reachable))
    with serving.serving(arguments, folder.path / "server.log") as target:
        facts = asyncio.run(serving.inspect_server(target, sampling.to_body()))
        judge_json = None if judge is None else judge.to_json()
        manifest = settings.manifest_of(
            benchmark, questions, rows, sampling, arguments.seed, judge_json, facts, arguments.certificate
        )
        is_continued = folder.open(manifest, questions)
        say(f"manifest {manifest.content_hash}{', continued' if is_continued else ''}: {folder.path}")
        from deepinfer_evals.runner import Session, run_session  # inspect_ai takes seconds to import

        judgements = Judgements(judge_json, read_lines(folder.judgements_path)) if judge_json is not None else None
        with Journal(folder.sessions_path) as sessions:
            sessions.append(_session_record(arguments, [question.id for question in selected]))
        outcomes = run_session(
            Session(
                benchmark=benchmark,
                questions=selected,
                epochs=arguments.epochs,
                run_seed=arguments.seed,
                body=sampling.to_body(),
                facts=facts,
                concurrency=arguments.concurrency,
                folder=folder,
                judgements=judgements,
                judge=settings.judge_endpoint(arguments, judge),
            )
        )
    wanted = len(selected) * arguments.epochs
    say(
        f"{outcomes.finished} of {wanted} answers finished: {outcomes.asked} asked now, "
        f"{outcomes.replayed} stored before"
    )
    for line in outcomes.errors[:SHOWN_ERRORS]:
        say(f"not finished: {line}")
    report = report_of(folder)
    say(write_reports(folder, report))
    if outcomes.finished < wanted or outcomes.errors:
        say("incomplete: run the same command again, finished answers are kept")
        return INCOMPLETE
    return 0


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"run: package {missing[0]} is not installed, expected those of the extra evals; "
            "pip install 'deepinfer-plugin[evals]'"
        )


def _revision(folder: RunFolder, arguments: argparse.Namespace) -> str | None:
    """A run that is continued keeps the commit of its rows."""
    if arguments.revision is None and arguments.data_dir is None and (folder.path / "manifest.json").exists():
        return str(folder.manifest().hashed["dataset"]["revision"])
    return None if arguments.revision is None else str(arguments.revision)


def _say_size(benchmark: Benchmark, found: int, selected: int, epochs: int) -> None:
    say(f"{benchmark.name}: {selected} of {found} questions, {epochs} epochs, {selected * epochs} answers")
    if found != benchmark.num_questions:
        say(f"note: the data set has {found} questions, the benchmark {benchmark.num_questions}: no score of the whole")


def _session_record(arguments: argparse.Namespace, ids: list[str]) -> dict[str, Any]:
    return {
        "begin_s": round(time.time(), 3),
        "questions": ids,
        "epochs": arguments.epochs,
        "samples": arguments.samples,
        "limit": arguments.limit,
        "order": arguments.order,
        "concurrency": arguments.concurrency,
    }
