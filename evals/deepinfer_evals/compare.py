"""``compare A B``: did the score move, and was it the sampling, the engine, the questions or the grader?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer_evals import intervals, samples
from deepinfer_evals.manifest import Difference, differences
from deepinfer_evals.report import results_of, verdicts_of
from deepinfer_evals.run_folder import RunFolder, write_json
from deepinfer_evals.tasks import benchmark_named
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import InputError

SHOWN = 8


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("compare", help="two runs of one benchmark: scores by question, and what differs")
    parser.add_argument("first", type=Path, metavar="A", help="folder of a run")
    parser.add_argument("second", type=Path, metavar="B", help="folder of another run")
    parser.add_argument(
        "--out", type=Path, default=None, metavar="FILE.json", help="write the comparison there as well"
    )
    parser.set_defaults(run=_run)


def comparison(first: RunFolder, second: RunFolder) -> dict[str, Any]:
    """The comparison as plain values.

    Raises:
        InputError: a folder is no run, they ask different benchmarks, or they share no sample.
    """
    manifests = first.manifest(), second.manifest()
    names = [benchmark_named(str(manifest.hashed["benchmark"]["name"])).name for manifest in manifests]
    if names[0] != names[1]:
        raise InputError(f"compare: the runs ask {names[0]} and {names[1]}, expected one benchmark; name two such runs")
    answers = first.answers(), second.answers()
    shared = sorted(answers[0].keys() & answers[1].keys())
    if not shared:
        raise InputError("compare: the runs share no finished sample, expected some; run the same questions and epochs")
    verdicts = [
        verdicts_of(folder, manifest, folder.questions_of(answered), answered)
        for folder, manifest, answered in zip((first, second), manifests, answers, strict=True)
    ]
    moved = [key for key in shared if verdicts[0][key].outcome != verdicts[1][key].outcome]
    parted = samples.differences(*answers)
    parted_keys = {one.key for one in parted if one.token is not None}
    found = list(differences(manifests[0].hashed, manifests[1].hashed))
    paired = intervals.paired(results_of(verdicts[0]), results_of(verdicts[1]))
    return {
        "benchmark": names[0],
        "manifests": [manifest.content_hash for manifest in manifests],
        "manifest_differences": [{**asdict(one), "cause": one.cause} for one in found],
        "causes": list(dict.fromkeys(one.cause for one in found)),
        "shared_samples": len(shared),
        "identical_samples": len(shared) - len(parted),
        "samples_with_other_tokens": len(parted_keys),
        "sample_differences": [{**asdict(one), "text": str(one)} for one in parted],
        "verdicts_moved": len(moved),
        "verdicts_moved_with_equal_tokens": sum(key not in parted_keys for key in moved),
        "paired": asdict(paired),
        "conclusion": conclusion(found, len(parted), "the two runs"),
    }


def conclusion(found: Sequence[Difference], num_parted: int, what: str) -> str:
    """One sentence on where a difference comes from, as far as the manifests tell."""
    causes = ", ".join(f"{cause} ({_paths(found, cause)})" for cause in dict.fromkeys(one.cause for one in found))
    if not num_parted and not found:
        return f"identical: every shared answer of {what}, and the manifests"
    if not num_parted:
        return f"identical answers; the manifests of {what} differ in {causes}"
    if not found:
        return (
            "answers differ and nothing in the manifests does: the engine computed something else from equal inputs "
            "(not batch-invariant, or changed where the manifest cannot see it); deepinfer_determinism can locate it"
        )
    return f"answers differ, and the manifests of {what} differ in {causes}"


def _paths(found: Sequence[Difference], cause: str) -> str:
    paths = [one.path for one in found if one.cause == cause]
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more


def _run(arguments: argparse.Namespace) -> int:
    value = comparison(RunFolder(arguments.first), RunFolder(arguments.second))
    paired, gain = value["paired"], value["paired"]["difference"]
    say(f"{value['benchmark']}: {value['shared_samples']} shared samples, {value['identical_samples']} identical")
    say(
        f"B minus A by question: {100 * gain['mean']:+.2f} points, 95 % interval {100 * gain['low']:+.2f} to "
        f"{100 * gain['high']:+.2f}, p = {paired['p_value']:.3g}; better on {paired['better']}, worse on "
        f"{paired['worse']}, equal on {paired['equal']} questions"
    )
    say(
        f"verdicts that moved: {value['verdicts_moved']}, of these {value['verdicts_moved_with_equal_tokens']} with "
        "equal tokens (then it was the grader)"
    )
    for one in value["sample_differences"][:SHOWN]:
        say(f"  {one['text']}")
    say(value["conclusion"])
    if arguments.out is not None:
        write_json(arguments.out, value)
    return 0
