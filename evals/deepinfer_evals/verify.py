"""``verify RUN``: ask a part of a run again and compare to the bit; say what differs, and where it can come from."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals import data, samples, serving, settings
from deepinfer_evals.benchmark import Question
from deepinfer_evals.canonical import text_hash
from deepinfer_evals.certificates import read_certificate
from deepinfer_evals.compare import conclusion
from deepinfer_evals.endpoint import Answer, BusyError, Endpoint
from deepinfer_evals.manifest import Difference, Manifest, differences, grader_hash
from deepinfer_evals.run_folder import Key, RunFolder, write_json
from deepinfer_evals.seeds import RULE, keyed_order, sample_seed
from deepinfer_evals.tasks import benchmark_named
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError, SettingError

IDENTICAL, DIFFERENT = 0, 1
SHOWN = 8
TRIES = 5
FIRST_WAIT_S = 0.5


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("verify", help="ask samples of a run again and compare every bit")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    serving.add_arguments(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--part", type=int, default=16, metavar="N", help="N samples drawn at random (default 16)")
    size.add_argument("--all", action="store_true", help="every finished sample")
    parser.add_argument("--choice", default=None, metavar="TEXT", help="draws the same part again")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight (default 16)")
    parser.add_argument("--override", default="{}", metavar="JSON", help="ask with other sampling parameters")
    settings.add_data(parser)
    parser.add_argument(
        "--certificate", type=Path, default=None, help="determinism certificate of the server's machine"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json", help="write the findings there as well")
    parser.set_defaults(run=_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What would be asked now, beside what was asked: questions, sampling, and findings about them so far."""

    questions: Mapping[str, Question]
    body: Mapping[str, Any]
    findings: tuple[str, ...]
    changed: tuple[Difference, ...]


def _run(arguments: argparse.Namespace) -> int:
    folder = RunFolder(arguments.run_folder)
    manifest, answers = folder.manifest(), folder.answers()
    settings.check_concurrency(arguments.concurrency)
    if not answers:
        raise InputError(f"verify: {folder.path} holds no finished answer, expected some; run it first")
    again = _again(folder, manifest, arguments)
    keys = _keys(sorted(answers), arguments)
    with serving.serving(arguments, folder.path / "verify-server.log") as target:
        facts = asyncio.run(serving.inspect_server(target, dict(again.body)))
        server = {**facts.hashed, "certificate": _certificate(manifest, arguments.certificate)}
        changed = [*again.changed, *differences(manifest.hashed["server"], json.loads(json.dumps(server)), "server")]
        say(f"verify: asking {len(keys)} of {len(answers)} samples again")
        here = asyncio.run(_ask_all(manifest, again, keys, facts, arguments.concurrency))
    parted = samples.differences({key: answers[key] for key in keys}, here)
    verdict = conclusion(changed, len(parted), "the run and of now")
    for line in (*again.findings, *_lines(changed, "manifest: "), *_lines(parted, "")):
        say(line)
    say(f"{len(keys) - len(parted)} of {len(keys)} samples identical in token ids and log-probability hashes")
    say(verdict)
    is_identical = not parted and not changed and not again.findings
    if arguments.out is not None:
        value = {
            "manifest": manifest.content_hash,
            "is_identical": is_identical,
            "asked": [list(key) for key in keys],
            "findings": list(again.findings),
            "manifest_differences": [{**asdict(one), "cause": one.cause} for one in changed],
            "sample_differences": [{**asdict(one), "text": str(one)} for one in parted],
            "conclusion": verdict,
        }
        write_json(arguments.out, value)
    return IDENTICAL if is_identical else DIFFERENT


def _again(folder: RunFolder, manifest: Manifest, arguments: argparse.Namespace) -> Again:
    """Questions and sampling of now, with what differs from the manifest."""
    benchmark = benchmark_named(str(manifest.hashed["benchmark"]["name"]))
    hashed = manifest.hashed
    stored = list(folder.questions_of(folder.answers()).values())
    findings = [
        f"prompts.jsonl was changed: the prompt of question {question.id} is not the one that the manifest hashed"
        for question in stored
        if hashed["prompts"]["questions"].get(question.id) != text_hash(question.prompt)
    ]
    now: dict[str, Any] = {
        "benchmark": {"name": benchmark.name, "version": benchmark.version},
        "seeds": {**hashed["seeds"], "rule": RULE},
        "grader": {**hashed["grader"], "source": grader_hash(benchmark.grader)},
        "prompts": {
            "template": text_hash(benchmark.template()),
            "questions": {question.id: text_hash(question.prompt) for question in stored},
        },
        "sampling": _overridden(hashed["sampling"], arguments.override),
    }
    questions = {question.id: question for question in stored}
    if arguments.data_dir is not None or arguments.revision is not None:
        rows = data.load(benchmark, revision=arguments.revision, data_dir=arguments.data_dir)
        rebuilt = {question.id: question for question in benchmark.questions(rows.rows)}
        now["prompts"]["questions"] = {name: text_hash(question.prompt) for name, question in rebuilt.items()}
        row_hashes = {name: question.row_hash for name, question in rebuilt.items()}
        now["dataset"] = {"source": rows.source, "revision": rows.revision, "rows": row_hashes}
        findings += _prompt_bytes(questions, rebuilt)
        questions |= rebuilt
    changed = [one for name in sorted(now) for one in differences(hashed[name], now[name], name)]
    return Again(questions=questions, body=now["sampling"], findings=tuple(findings), changed=tuple(changed))


def _prompt_bytes(there: Mapping[str, Question], here: Mapping[str, Question]) -> list[str]:
    """Where the prompts of both sides part, by byte."""
    found = []
    for name in sorted(there.keys() & here.keys()):
        first, second = (side[name].prompt.encode("utf-8", "surrogatepass") for side in (there, here))
        if first != second:
            pairs = enumerate(zip(first, second, strict=False))
            at = next((index for index, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))
            found.append(
                f"prompt of question {name}: differs at byte {at}, {first[at : at + 12]!r} there, "
                f"{second[at : at + 12]!r} here"
            )
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more prompts"]


def _overridden(sampling: Mapping[str, Any], text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingError(f"verify: --override is no JSON ({error}), expected an object") from None
    if not isinstance(value, dict):
        raise SettingError(f"verify: --override is {text}, expected a JSON object of sampling parameters")
    return {**sampling, **value}


def _keys(keys: Sequence[Key], arguments: argparse.Namespace) -> list[Key]:
    if arguments.all:
        return list(keys)
    if arguments.part < 1:
        raise SettingError(f"verify: --part is {arguments.part}, expected 1 or more")
    choice = arguments.choice or secrets.token_hex(4)
    say(f"verify: part drawn by --choice {choice}")
    return sorted(keyed_order(keys, choice)[: arguments.part])


def _certificate(manifest: Manifest, path: Path | None) -> str | None:
    """Hash of the certificate named now; that of the run where none is named, since nobody claims another."""
    if path is None:
        stored = manifest.hashed["server"].get("certificate")
        return None if stored is None else str(stored)
    return read_certificate(path).content_hash


async def _ask_all(
    manifest: Manifest, again: Again, keys: Sequence[Key], facts: serving.Facts, concurrency: int
) -> dict[Key, Answer]:
    name, run_seed = str(manifest.hashed["benchmark"]["name"]), int(manifest.hashed["seeds"]["run_seed"])
    slots = asyncio.Semaphore(concurrency)
    async with facts.target.endpoint(slots=concurrency) as endpoint, asyncio.TaskGroup() as group:
        endpoint.has_witness = facts.has_witness

        async def one(key: Key) -> Answer:
            async with slots:
                seed = sample_seed(run_seed, name, *key)
                return await _ask(endpoint, again.questions[key[0]].prompt, again.body, seed)

        tasks = {key: group.create_task(one(key)) for key in keys}
    return {key: task.result() for key, task in tasks.items()}


async def _ask(endpoint: Endpoint, prompt: str, body: Mapping[str, Any], seed: int) -> Answer:
    for attempt in range(TRIES):
        try:
            return await endpoint.ask(prompt, body, seed)
        except BusyError:
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")


def _lines(found: Sequence[object], head: str) -> list[str]:
    lines = [f"{head}{one}" for one in found[:SHOWN]]
    return lines if len(found) <= SHOWN else [*lines, f"{head}and {len(found) - SHOWN} more"]
