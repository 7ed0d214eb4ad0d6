"""``doctor``: can a score of this server be run again? It asks the server what it is, and tries whether it is so."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepinfer_evals import serving
from deepinfer_evals.certificates import read_certificate
from deepinfer_evals.endpoint import Answer, Endpoint
from deepinfer_evals.samples import difference
from deepinfer_plugin.cli.console import say

GOOD, WARN, BAD = "ok", "note", "FAIL"
NUM_OTHERS = 15
NUM_SEEDS = 4
NUM_TOKENS = 24
PROBE = "the quick brown fox jumps over the lazy dog, and then"
BODY: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": NUM_TOKENS}
SEED = 20_261


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the result."""

    verdict: str
    name: str
    detail: str


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("doctor", help="whether scores of a server can be run again; tries it")
    serving.add_arguments(parser)
    parser.add_argument(
        "--certificate", type=Path, default=None, help="determinism certificate of the server's machine"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with (
        TemporaryDirectory(prefix="deepinfer-doctor-") as folder,
        serving.serving(arguments, Path(folder) / "server.log") as target,
    ):
        findings = asyncio.run(examine(target, arguments.certificate))
    for finding in findings:
        say(f"{finding.verdict:4}  {finding.name}: {finding.detail}")
    num_bad = sum(finding.verdict == BAD for finding in findings)
    say("scores of this server can be run again" if not num_bad else f"{num_bad} checks failed: they cannot")
    return 1 if num_bad else 0


async def examine(target: serving.Target, certificate: Path | None) -> list[Finding]:
    """Every check, in the order in which it is read.

    Raises:
        EngineError: the server cannot be reached or refuses the question.
        SettingError: the model is not one that it serves.
        InputError: the certificate cannot be read.
    """
    facts = await serving.inspect_server(target, BODY)
    async with facts.target.endpoint() as endpoint:
        endpoint.has_witness = facts.has_witness
        provenance = await endpoint.provenance()
        found = [_version(provenance, await endpoint.version()), _mode(provenance), _code(provenance)]
        found.append(_witness(facts.has_witness))
        found += await _tries(endpoint)
    found.append(_certificate(certificate, provenance))
    return found


def _version(provenance: Mapping[str, Any] | None, version: str) -> Finding:
    if provenance is None:
        detail = f"version {version}; it serves no provenance: a manifest cannot say what ran"
        return Finding(verdict=WARN, name="version", detail=detail)
    versions, machine = provenance["versions"], provenance["machine"]
    detail = (
        f"plugin {versions['deepinfer-plugin']}, vLLM {versions['vllm']}, {machine.get('device_name')}, kernel set "
        f"{machine.get('kernel_set')}, {len(provenance['checkpoint'])} files of the checkpoint hashed"
    )
    return Finding(verdict=GOOD, name="version", detail=detail)


def _mode(provenance: Mapping[str, Any] | None) -> Finding:
    if provenance is None:
        return Finding(verdict=WARN, name="batch-invariant mode", detail="unknown; the trials below must do")
    if provenance["batch_invariant"]:
        return Finding(verdict=GOOD, name="batch-invariant mode", detail="on")
    return Finding(verdict=BAD, name="batch-invariant mode", detail="off; start it with DEEPINFER_BATCH_INVARIANT=1")


def _code(provenance: Mapping[str, Any] | None) -> Finding:
    count = len((provenance or {}).get("code", ()))
    if count:
        return Finding(verdict=GOOD, name="kernels", detail=f"{count} functions of the engine process hashed by name")
    detail = "functions of the engine process are not hashed: a changed kernel is found, but not named"
    return Finding(verdict=WARN, name="kernels", detail=detail)


def _witness(has_witness: bool) -> Finding:
    if has_witness:
        return Finding(verdict=GOOD, name="witness", detail="token ids and hashes of log-probabilities come back")
    detail = "none: every log-probability is sent and hashed here, which long answers make slow"
    return Finding(verdict=WARN, name="witness", detail=detail)


async def _tries(endpoint: Endpoint) -> list[Finding]:
    """Ask, and look whether it is as promised."""
    alone = await endpoint.ask(PROBE, BODY, SEED)
    again = await endpoint.ask(PROBE, BODY, SEED)
    unseeded = await endpoint.ask(PROBE, BODY, None)
    others = [endpoint.ask(f"{'a b c ' * (n % 5)}neighbour {n}", BODY, SEED + n) for n in range(NUM_OTHERS)]
    crowded, *_ = await asyncio.gather(endpoint.ask(PROBE, BODY, SEED), *others)
    drawn = [await endpoint.ask(PROBE, BODY, SEED + n) for n in range(NUM_SEEDS)]
    distinct = len({answer.token_ids.tobytes() for answer in drawn})
    is_seeded = alone.seed == SEED and unseeded.seed != -1
    repeated = None if unseeded.seed == -1 else await endpoint.ask(PROBE, BODY, unseeded.seed)
    return [
        _same("a seed repeats its answer", alone, again),
        _same(f"the same among {NUM_OTHERS} others", alone, crowded),
        Finding(
            verdict=GOOD if distinct > 1 else BAD,
            name="seeds are used",
            detail=f"{distinct} different answers to {NUM_SEEDS} seeds",
        ),
        Finding(
            verdict=GOOD if is_seeded else WARN,
            name="seeds come back",
            detail="the answer names its seed" if is_seeded else "an answer without a seed does not name the one drawn",
        ),
        *([] if repeated is None else [_same("a drawn seed repeats its answer", unseeded, repeated)]),
    ]


def _same(name: str, there: Answer, here: Answer) -> Finding:
    found = difference((PROBE[:9] + "…", 1), there, here)
    detail = f"{len(there.token_ids)} tokens and the hashes agree" if found is None else str(found)
    return Finding(verdict=GOOD if found is None else BAD, name=name, detail=detail)


def _certificate(path: Path | None, provenance: Mapping[str, Any] | None) -> Finding:
    if path is None:
        detail = "none named; make one on the server's machine with deepinfer_determinism, then pass --certificate"
        return Finding(verdict=WARN, name="certificate", detail=detail)
    found = read_certificate(path)
    if not found.is_passed:
        return Finding(verdict=BAD, name="certificate", detail=f"{found.content_hash[:16]} did not pass")
    other = list(found.differences(provenance or {}))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        detail = f"{found.content_hash[:16]} is of another environment: {other[0]}{more}"
        return Finding(verdict=BAD, name="certificate", detail=detail)
    return Finding(verdict=GOOD, name="certificate", detail=f"{found.content_hash[:16]} passed, same environment")
