"""Arguments of the commands that ask a server: how answers are drawn, where rows come from, who judges."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_evals import serving
from deepinfer_evals.benchmark import Benchmark, Question
from deepinfer_evals.certificates import read_certificate
from deepinfer_evals.data import DataSet
from deepinfer_evals.endpoint import Endpoint
from deepinfer_evals.judge import JudgeSetting
from deepinfer_evals.manifest import Manifest, make
from deepinfer_evals.sampling import MAX_EFFORT, Sampling
from deepinfer_plugin.errors import InputError, SettingError

MAX_CONCURRENCY = 4096


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``Sampling``."""
    default = Sampling()
    parser.add_argument("--temperature", type=float, default=default.temperature, help="default 1.0")
    parser.add_argument("--top-p", type=float, default=default.top_p, help="default 0.95")
    parser.add_argument("--top-k", type=int, default=default.top_k, help="default 0, off")
    parser.add_argument("--min-p", type=float, default=default.min_p, help="default 0, off")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="default 131072, reasoning included")
    parser.add_argument("--effort", default=str(MAX_EFFORT), help="1 to 100 (default), 0: no reasoning, none: not sent")
    parser.add_argument("--extra-body", default="{}", metavar="JSON", help="further fields of every request")


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """The sampling that the arguments name.

    Raises:
        SettingError: a value outside its rule.
    """
    effort: int | None = None
    if arguments.effort != "none":
        if not arguments.effort.isascii() or not arguments.effort.isdigit():
            raise SettingError(f"sampling: --effort is {arguments.effort!r}, expected 0 to 100, or none")
        effort = int(arguments.effort)
    try:
        extra = json.loads(arguments.extra_body)
    except ValueError as error:
        raise SettingError(f"sampling: --extra-body is no JSON ({error}), expected an object") from None
    if not isinstance(extra, dict):
        raise SettingError(f"sampling: --extra-body is {arguments.extra_body}, expected a JSON object")
    return Sampling(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        max_tokens=arguments.max_tokens,
        effort=effort,
        extra=extra,
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Arguments that say where rows come from."""
    parser.add_argument("--revision", default=None, help="commit of the data set on the hub (default: the newest)")
    parser.add_argument("--data-dir", type=Path, default=None, metavar="DIR", help="a local copy of the data set")


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Arguments of the judge."""
    parser.add_argument("--judge-url", default=None, help="hle: OpenAI-compatible server of the judge")
    parser.add_argument("--judge-model", default="", help="hle: model that judges; part of the manifest")
    parser.add_argument("--judge-seed", type=int, default=0, help="hle: seed of the judge (default 0)")
    parser.add_argument("--judge-max-tokens", type=int, default=4096, help="hle: longest reply of the judge")
    parser.add_argument("--judge-key-file", type=Path, default=None, help="hle: file that holds the judge's key")


def judge_of(benchmark: Benchmark, arguments: argparse.Namespace) -> JudgeSetting | None:
    """The pinned judge, where the benchmark has one.

    Raises:
        SettingError: a judge is needed and not named, or named and not needed.
    """
    if benchmark.grader != "judge":
        if arguments.judge_url is not None or arguments.judge_model:
            raise SettingError(f"judge: --judge-url is given, but {benchmark.name} is graded by rules; leave it out")
        return None
    if arguments.judge_url is None or not arguments.judge_model:
        raise SettingError(
            f"judge: {benchmark.name} is graded by a model, expected --judge-url and --judge-model; name a server"
        )
    return JudgeSetting(model=arguments.judge_model, seed=arguments.judge_seed, max_tokens=arguments.judge_max_tokens)


def judge_endpoint(arguments: argparse.Namespace, setting: JudgeSetting | None) -> Endpoint | None:
    """A client of the judge."""
    if setting is None:
        return None
    key = serving.read_key(arguments.judge_key_file)
    return Endpoint(arguments.judge_url, setting.model, api_key=key, role="judge")


def check_concurrency(value: int) -> int:
    """Requests in flight.

    Raises:
        SettingError: outside 1 to 4096.
    """
    if not 1 <= value <= MAX_CONCURRENCY:
        raise SettingError(f"run: --concurrency is {value}, expected 1 to {MAX_CONCURRENCY}")
    return value


def manifest_of(
    benchmark: Benchmark,
    questions: Sequence[Question],
    data: DataSet,
    sampling: Sampling,
    run_seed: int,
    judge: Mapping[str, Any] | None,
    facts: serving.Facts,
    certificate: Path | None,
) -> Manifest:
    """The manifest of what would be asked now.

    Raises:
        InputError: the data set is empty, or the certificate cannot be read.
    """
    if not questions:
        raise InputError(f"data set: {data.source} has no row that {benchmark.name} can ask, expected some")
    server = {
        **facts.hashed,
        "certificate": None if certificate is None else read_certificate(certificate).content_hash,
    }
    return make(
        benchmark,
        questions,
        data,
        sampling=sampling,
        run_seed=run_seed,
        judge=judge,
        server=server,
        recorded=facts.recorded,
    )
