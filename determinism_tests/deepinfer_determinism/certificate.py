"""Certificates: what was shown, for which environment, as JSON with a schema and a hash over its content.

The schema is the dataclasses themselves: every field present, none unknown, every value of its type.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepinfer_determinism.results import (
    DIFFERENT,
    EQUAL,
    FORMAT,
    NOT_APPLICABLE,
    NOT_EXERCISED,
    RunResult,
)
from deepinfer_determinism.schedule import SMALL_CHECKPOINTS
from deepinfer_plugin import provenance
from deepinfer_plugin.answer_provenance import CERTIFICATE_KIND
from deepinfer_plugin.answer_provenance import content_hash as content_hash
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError, SettingError
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.settings import Accelerator, Settings

KIND = CERTIFICATE_KIND
SAME_MACHINE, OTHER_MACHINE = 0, 1
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over the run, so that a reader need not add them up; ``verify`` adds them up again."""

    rows_compared: int
    differences: int
    relations_equal: int
    relations_different: int
    relations_not_exercised: int
    relations_not_applicable: int
    mutants: int
    mutants_killed: int
    thresholds: int
    thresholds_covered: int
    is_passed: bool

    @classmethod
    def of(cls, run: RunResult) -> Summary:
        outcomes = [result.outcome for result in run.relations]
        return cls(
            rows_compared=run.rows_compared + sum(result.rows_compared for result in run.operations),
            differences=sum(r.differences for r in run.relations) + sum(o.differences for o in run.operations),
            relations_equal=outcomes.count(EQUAL),
            relations_different=outcomes.count(DIFFERENT),
            relations_not_exercised=outcomes.count(NOT_EXERCISED),
            relations_not_applicable=outcomes.count(NOT_APPLICABLE),
            mutants=len(run.mutants),
            mutants_killed=sum(mutant.is_killed for mutant in run.mutants),
            thresholds=len(run.coverage),
            thresholds_covered=sum(row.is_covered for row in run.coverage),
            is_passed=run.is_passed,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def make(run: RunResult, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate of a run in an environment, see ``environment_here``."""
    body = {
        "kind": KIND,
        "format": FORMAT,
        "environment": dict(environment),
        "summary": Summary.of(run).to_json(),
        "run": run.to_json(),
    }
    body = json.loads(json.dumps(body))  # what a reader of the file gets: lists for tuples
    return {**body, "content_hash": content_hash(body)}


def environment_here(weights_hash: str | None) -> dict[str, Any]:
    """Versions, machine, kernel set, settings and patches of this process; weights where their hash is known."""
    decision = current_decision()
    if decision is None:
        raise SettingError("certificate: the plugin has chosen no platform here, expected one; see the status command")
    found = provenance.collect(Settings.from_envs(), Capabilities.from_decision(decision), weights_hash)
    value: dict[str, Any] = json.loads(json.dumps(found))
    return value


def weights_hash(checkpoint: str, model: Path | None) -> str | None:
    """What the run's weights were.

    Args:
        checkpoint: as the run names it; the small seeded ones, ``nano:0``, are made again and hashed, a folder is read.
        model: folder of the checkpoint where it lies elsewhere now; every file in it is read.

    Returns:
        SHA-256 over name and SHA-256 of each file, or the content hash of a small checkpoint; None where neither is.
    """
    if model is not None:
        if not model.is_dir():
            raise SettingError(f"certificate: --model is {model}, which is no folder, expected that of the checkpoint")
        whole = hashlib.sha256()
        for path in sorted(path for path in model.iterdir() if path.is_file()):
            whole.update(f"{path.name} {_file_hash(path)}\n".encode())
        return whole.hexdigest()
    name, _, seed = checkpoint.partition(":")
    if name in SMALL_CHECKPOINTS and (seed or "0").isdigit():
        from deepinfer_plugin.reference.tiny import write_checkpoint

        with TemporaryDirectory(prefix="deepinfer-certificate-") as folder:
            return str(write_checkpoint(name, int(seed or 0), Path(folder) / name))
    return weights_hash(checkpoint, Path(checkpoint)) if Path(checkpoint).is_dir() else None


def read(path: Path) -> dict[str, Any]:
    """A certificate whose schema, sums and hash hold.

    Raises:
        InputError: the file cannot be read, a field is missing, unknown or of another type, or it was changed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"certificate: {path} cannot be read ({error}), expected a whole JSON file") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise InputError(f"certificate: {path} is something else, expected kind {KIND!r}; name a certificate")
    if value.get("format") != FORMAT:
        raise InputError(f"certificate: {path} has format {value.get('format')!r}, expected {FORMAT}; make it again")
    found = content_hash(value)
    if value.get("content_hash") != found:
        raise InputError(
            f"certificate: {path} was changed after it was made: its content hashes to {found[:16]}…, it says "
            f"{str(value.get('content_hash'))[:16]}…; make it again from the run"
        )
    expected = {"kind", "format", "environment", "summary", "run", "content_hash"}
    problems = [f"fields {sorted(set(value) ^ expected)} are missing or unknown"] if set(value) != expected else []
    if not problems:
        problems = [*_problems(value["summary"], Summary, "summary"), *_run_problems(value["run"])]
    if not problems and not isinstance(value["environment"], dict):
        problems.append(f"environment is {type(value['environment']).__name__}, expected an object")
    if not problems and Summary.of(RunResult.from_json(value["run"])).to_json() != value["summary"]:
        problems.append("summary does not add up to the run")
    if problems:
        raise InputError(f"certificate: {path}: {problems[0]}, expected what this version writes; make it again")
    return value


def read_run(path: Path) -> RunResult:
    """The run in a result file of ``run`` or of ``certify``.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"run result: {path} cannot be read ({error}), expected the file of a run") from None
    if isinstance(value, dict) and "run" in value and value.get("kind") != KIND:
        value = value["run"]
    problem = next(_run_problems(value), None)
    if problem is not None:
        raise InputError(f"run result: {path}: {problem}, expected what run or certify writes; run it again")
    return RunResult.from_json(value)


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """Leaves of two environments that differ, one line each."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in sorted(there.keys() | here.keys()):
            missing = "absent"
            yield from differences(there.get(name, missing), here.get(name, missing), f"{path}.{name}".lstrip("."))
    elif there != here:
        yield f"{path}: certificate {there!r}, here {here!r}"


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("certificate", help="make a certificate of a run, or verify one")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    maker = actions.add_parser("make", help="from the result file of a run on this machine")
    maker.add_argument("run_file", type=Path, metavar="RUN", help="result file")
    maker.add_argument("--model", type=Path, default=None, help="folder of the checkpoint, to be hashed")
    maker.add_argument("--out", type=Path, default=Path("certificate.json"), help="default certificate.json")
    maker.set_defaults(run=_run_make)
    verifier = actions.add_parser("verify", help="check hash and schema, and compare with this machine")
    verifier.add_argument("file", type=Path, metavar="FILE", help="certificate")
    verifier.set_defaults(run=_run_verify)


def _run_make(arguments: argparse.Namespace) -> int:
    run = read_run(arguments.run_file)
    environment = environment_here(weights_hash(run.checkpoint, arguments.model))
    accelerator = environment["machine"]["accelerator"]
    if Accelerator.CPU.value in {run.device, accelerator} and run.device != accelerator:
        raise SettingError(
            f"certificate: {arguments.run_file} is of a run on {run.device} and this process is on {accelerator}, "
            "expected the same kind of device: a certificate describes the machine that it is made on; make it where "
            "the run was"
        )
    certificate = make(run, environment)
    write(certificate, arguments.out)
    say(f"certificate {certificate['content_hash'][:16]} of {run.rows_compared} rows: {arguments.out}")
    return SAME_MACHINE


def write(certificate: Mapping[str, Any], path: Path) -> None:
    """Write whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(certificate, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SettingError(f"certificate: --out is {path}, which cannot be written ({error}); choose another") from None


def _run_verify(arguments: argparse.Namespace) -> int:
    certificate = read(arguments.file)
    summary = certificate["summary"]
    say(f"content hash and schema hold: {certificate['content_hash']}")
    say(
        f"{summary['rows_compared']} rows compared, {summary['differences']} differ; "
        f"{summary['mutants_killed']} of {summary['mutants']} mutants caught; "
        f"{summary['thresholds_covered']} of {summary['thresholds']} thresholds crossed; "
        f"the run {'passed' if summary['is_passed'] else 'DID NOT PASS'}"
    )
    there = {**certificate["environment"]}
    weights = there.pop("weights_hash", None)
    found = list(differences(there, environment_here(None)))
    for line in found:
        say(f"differs from this machine: {line}")
    if not found:
        say("this machine is the one it was made on, as far as versions, device and settings tell")
    say(f"weights: {weights or 'not named'}")
    return OTHER_MACHINE if found else SAME_MACHINE


def _run_problems(value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        yield "run has another format"
        return
    yield from _problems({name: part for name, part in value.items() if name != "format"}, RunResult, "run")


def _problems(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Where ``value`` is not what ``json.dumps`` makes of a value of type ``kind``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            names = sorted(set(value) ^ set(hints)) if isinstance(value, dict) else type(value).__name__
            yield f"{path} has fields {names} missing or unknown"
            return
        for name, hint in hints.items():
            yield from _problems(value[name], hint, f"{path}.{name}")
    elif origin is types.UnionType:
        if all(list(_problems(value, choice, path)) for choice in inner):
            yield f"{path} is {value!r}, expected {kind}"
    elif origin is tuple:
        if not isinstance(value, list):
            yield f"{path} is {type(value).__name__}, expected a list"
            return
        for index, item in enumerate(value):
            yield from _problems(item, inner[0], f"{path}[{index}]")
    elif origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            yield f"{path} is {type(value).__name__}, expected an object"
            return
        for name, item in value.items():
            yield from _problems(item, inner[1], f"{path}.{name}")
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{path} is {value!r}, expected a number"
    elif kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{path} is {value!r}, expected an integer"
    elif not isinstance(value, kind):
        yield f"{path} is {value!r}, expected {getattr(kind, '__name__', kind)}"


def _file_hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()
