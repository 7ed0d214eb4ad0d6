"""The manifest: everything that a score depends on, hashed; a run is continued only under an equal hash.

``hashed`` is what an answer or its verdict depends on. ``recorded`` stands beside it: what must not matter (sizes of
batches, the address of the server, versions of the client), kept so that a broken promise can be looked into.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepinfer_evals import seeds
from deepinfer_evals.benchmark import Benchmark, Question
from deepinfer_evals.canonical import hash_of, text_hash
from deepinfer_evals.data import DataSet
from deepinfer_evals.sampling import Sampling
from deepinfer_plugin import __version__
from deepinfer_plugin.errors import InputError
from deepinfer_plugin.provenance_endpoint import file_hash

FORMAT = 1
GRADERS = Path(__file__).with_name("graders")
NOT_ENGINE_FACTS = ("memory_mib", "num_devices")  # of the machine; they decide what fits, not what comes out
CLIENT_PACKAGES = ("inspect_ai", "datasets", "httpx")
ABSENT = "absent"

# What can move a score, by section of the manifest: sampling or the engine, or neither.
CAUSES = {
    "benchmark": "benchmark",
    "dataset": "data set",
    "prompts": "prompts",
    "sampling": "sampling",
    "seeds": "seeds",
    "grader": "grader",
    "server": "engine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf that differs between two manifests."""

    path: str
    there: Any
    here: Any

    @property
    def cause(self) -> str:
        """The section in words."""
        return CAUSES[self.path.partition(".")[0]]

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.there)} there, {_short(self.here)} here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One manifest."""

    hashed: Mapping[str, Any]
    recorded: Mapping[str, Any]

    @property
    def content_hash(self) -> str:
        """SHA-256 of ``hashed``."""
        return hash_of(self.hashed)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the hash."""
        return {
            "format": FORMAT,
            "content_hash": self.content_hash,
            "hashed": dict(self.hashed),
            "recorded": dict(self.recorded),
        }

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """A manifest from its file.

        Raises:
            InputError: it cannot be read, or its content is not what was hashed.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            found = cls(hashed=dict(value["hashed"]), recorded=dict(value["recorded"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"manifest: {path} cannot be read ({error}), expected that of a run folder") from None
        if value.get("format") != FORMAT:
            raise InputError(f"manifest: {path} has format {value.get('format')!r}, expected {FORMAT}; run again")
        if value.get("content_hash") != found.content_hash:
            raise InputError(
                f"manifest: {path} was changed: its content hashes to {found.content_hash[:16]}…, it says "
                f"{str(value.get('content_hash'))[:16]}…; restore the file, or run again into another folder"
            )
        lacking = [name for name in CAUSES if not isinstance(found.hashed.get(name), Mapping)]
        if lacking:
            raise InputError(f"manifest: {path} has no {lacking[0]}, expected {', '.join(CAUSES)}; run again")
        return found


def make(
    benchmark: Benchmark,
    questions: Sequence[Question],
    data: DataSet,
    *,
    sampling: Sampling,
    run_seed: int,
    judge: Mapping[str, Any] | None,
    server: Mapping[str, Any],
    recorded: Mapping[str, Any],
) -> Manifest:
    """The manifest of a run.

    Args:
        benchmark: what is asked.
        questions: all of the data set, whatever part of them is asked.
        data: where the rows came from.
        sampling: how answers are drawn.
        run_seed: of the run.
        judge: see ``judge.JudgeSetting.to_json``; None where the grader is a rule.
        server: see ``server_facts``.
        recorded: what stands beside the hash.
    """
    rows = {question.id: question.row_hash for question in questions}
    hashed = {
        "benchmark": {"name": benchmark.name, "version": benchmark.version},
        "dataset": {"source": data.source, "revision": data.revision, "rows": rows},
        "prompts": {
            "template": text_hash(benchmark.template()),
            "questions": {question.id: text_hash(question.prompt) for question in questions},
        },
        "sampling": sampling.to_json(),
        "seeds": {"run_seed": run_seed, "rule": seeds.RULE},
        "grader": {"name": benchmark.grader, "source": grader_hash(benchmark.grader), "judge": judge},
        "server": dict(server),
    }
    plain: dict[str, Any] = json.loads(json.dumps({"hashed": hashed, "recorded": {**recorded, "client": _client()}}))
    return Manifest(**plain)


def grader_hash(name: str) -> str:
    """Hash over the sources that decide a verdict; another wording of a rule is another grader."""
    rules = {"integer": ("arithmetic", "integer"), "choice": ("choice",), "judge": ("judge_reply",)}[name]
    return hash_of([file_hash(GRADERS / f"{module}.py") for module in ("verdict", *rules)])


def server_facts(provenance: Mapping[str, Any] | None, model: str, version_text: str) -> tuple[Any, dict[str, Any]]:
    """(hashed, recorded) part of what a server says of itself."""
    if provenance is None:
        return {"model": model, "version": version_text, "provenance": "not served"}, {}
    machine = dict(provenance.get("machine", {}))
    size = {name: machine.pop(name) for name in NOT_ENGINE_FACTS if name in machine}
    names = ("versions", "settings", "patches", "batch_invariant", "checkpoint", "options", "code")
    return (
        {"model": model, "machine": machine, **{name: provenance.get(name) for name in names}},
        {"schedule": provenance.get("schedule"), "machine": size},
    )


def differences(there: Any, here: Any, path: str = "") -> Iterator[Difference]:
    """Leaves of two ``hashed`` parts that differ."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(there.keys() | here.keys()):
            inner = f"{path}.{name}" if path else name
            yield from differences(there.get(name, ABSENT), here.get(name, ABSENT), inner)
    elif there != here:
        yield Difference(path=path, there=there, here=here)


def _client() -> dict[str, str]:
    found = {"deepinfer_evals": __version__}
    for name in CLIENT_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ABSENT
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
