"""Trials of the whole program against a server of its own on a small random checkpoint.

``schedules``: the same answers from other order, concurrency and cuts; ``changes``: planted changes are found and
named; ``kills``: nothing is lost to a kill or asked twice. Tests run them small, this program at any size.
Exit code 0: as promised; 1: not so; 2: one line on standard error says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer_evals import mini
from deepinfer_evals.__main__ import main
from deepinfer_evals.compare import comparison
from deepinfer_evals.kills import KilledRun, Kills
from deepinfer_evals.relay import Relay
from deepinfer_evals.run_folder import RunFolder
from deepinfer_kernels.errors import DeepInferError
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.server import Server, free_port

BENCHMARK = "aime2026"
LONG, SHORT = "10,40", "2,8"  # letters before the answer; short ones make kills cheap
FLAGS = (
    "--served-model-name=served",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--reasoning-parser=deepseek_v41",
)
START_S = 900.0
ANSWER_S = 1.5  # a short answer of the nano checkpoint on two cores
TRIALS = ("schedules", "changes", "kills")


def words(base_url: str, rows: Path, out: Path, *more: object, letters: str = LONG) -> list[str]:
    """Command line of a run whose answers are noise with a digit in a box: scores neither 0 nor 1."""
    form = {"structured_outputs": {"regex": f"[a-z ]{{{letters}}}\\\\boxed\\{{[0-3]\\}}"}}
    fixed = ("--max-tokens", 64, "--effort", 0, "--extra-body", json.dumps(form))
    line = ("run", BENCHMARK, "--base-url", base_url, "--data-dir", rows, "--out", out, *fixed, *more)
    return [str(word) for word in line]


def run(line: list[str]) -> None:
    """One whole run.

    Raises:
        AssertionError: it did not finish.
    """
    code = main(line)
    assert code == 0, f"{' '.join(line)} ended with {code}"


def two_schedules(base_url: str, folder: Path, questions: int, epochs: int) -> dict[str, Any]:
    """Run everything at once, then again in two parts of other order and concurrency; returns their comparison."""
    rows = mini.write_rows(folder / "rows", mini.aime_rows(questions))
    first, second = folder / "whole", folder / "parts"
    cut = questions * 3 // 8
    lines = (
        words(base_url, rows, first, "--epochs", epochs, "--concurrency", 24),
        words(base_url, rows, second, "--epochs", epochs, "--concurrency", 3, "--limit", cut, "--order", "reverse"),
        words(
            base_url, rows, second, "--epochs", epochs, "--concurrency", 11,
            "--limit", f"{cut + 1}-{questions}", "--order", "shuffled",
        ),
    )  # fmt: skip
    for line in lines:
        run(line)
    return comparison(RunFolder(first), RunFolder(second))


def verified(base_url: str, folder: Path, out: Path, *more: object) -> tuple[int, dict[str, Any]]:
    """Exit code and findings of ``verify`` over every sample of a run."""
    line = ("verify", folder, "--base-url", base_url, "--all", "--concurrency", 8, "--out", out, *more)
    code = main([str(word) for word in line])
    return code, json.loads(out.read_text(encoding="utf-8"))


def changed_byte(folder: Path, copy: Path, number: int) -> str:
    """Copy a run and change one byte in the stored prompt of its ``number``-th question; returns the question's id."""
    shutil.copytree(folder, copy)
    path = copy / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[number])
    lines[number] = json.dumps({**record, "prompt": record["prompt"].replace("What is", "What iz", 1)})
    assert json.loads(lines[number]) != record, "the prompt has no byte to change"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(record["id"])


def planted(base_url: str, folder: Path, number: int) -> dict[str, bool]:
    """Verify the run ``whole`` as it is, with one sampling parameter and with one prompt byte changed.

    Args:
        base_url: of the server that answered it.
        folder: holds ``whole``, and takes what is written.
        number: of the question whose prompt is changed.

    Returns:
        By change, whether exactly what was changed was named.
    """
    whole = folder / "whole"
    code, found = verified(base_url, whole, folder / "same.json")
    result = {"nothing": code == 0 and found["is_identical"]}
    code, found = verified(base_url, whole, folder / "top_p.json", "--override", '{"top_p": 0.8}')
    paths = [one["path"] for one in found["manifest_differences"]]
    result["sampling parameter"] = code == 1 and paths == ["sampling.top_p"] and bool(found["sample_differences"])
    question = changed_byte(whole, folder / "byte", number)
    code, found = verified(base_url, folder / "byte", folder / "byte.json")
    parted = {(one["key"][0], one["key"][1]) for one in found["sample_differences"]}
    asked = {(name, epoch) for name, epoch in found["asked"] if name == question}
    named = [f"the prompt of question {question} " in line for line in found["findings"]]
    paths = [one["path"] for one in found["manifest_differences"]]
    result["prompt byte"] = (
        code == 1 and named == [True] and parted == asked and paths == [f"prompts.questions.{question}"]
    )
    return result


def killed_run(
    server: Server, folder: Path, questions: int, epochs: int, kills: int, seed: int = 1
) -> tuple[Kills, dict[str, Any]]:
    """A run with short answers killed so often, and its comparison with one that was left alone."""
    rows = mini.write_rows(folder / "rows", mini.aime_rows(questions))
    alone, out = folder / "short", folder / "killed"
    run(words(server.base_url, rows, alone, "--epochs", epochs, "--concurrency", 24, letters=SHORT))
    with Relay(server.base_url) as relay:
        line = words(relay.base_url, rows, out, "--epochs", epochs, "--concurrency", 4, letters=SHORT)
        found = KilledRun(relay, line, out, questions * epochs).killed(kills, seed=seed, spread_s=ANSWER_S)
    return found, comparison(RunFolder(alone), RunFolder(out))


def _trials(server: Server, arguments: argparse.Namespace, names: list[str]) -> bool:
    """Run them; whether all went as promised."""
    folder, is_good = arguments.dir, True
    questions, epochs, samples = arguments.questions, arguments.epochs, arguments.questions * arguments.epochs
    if "schedules" in names or "changes" in names:
        begin_s = time.monotonic()
        found = two_schedules(server.base_url, folder, questions, epochs)
        say(
            f"two schedules in {time.monotonic() - begin_s:.0f} s: {found['identical_samples']} of "
            f"{samples} samples identical, {found['verdicts_moved']} verdicts moved; {found['conclusion']}"
        )
        is_good &= found["identical_samples"] == samples and not found["manifest_differences"]
    if "changes" in names:
        for name, was_named in planted(server.base_url, folder, questions // 2).items():
            say(f"changed {name}: {'named, and nothing else' if was_named else 'NOT named as it was changed'}")
            is_good &= was_named
    if "kills" in names:
        begin_s = time.monotonic()
        kills, found = killed_run(server, folder, questions, epochs, arguments.kills)
        say(
            f"killed run in {time.monotonic() - begin_s:.0f} s: {kills}; {found['identical_samples']} of {samples} "
            f"samples identical with a run left alone; {found['conclusion']}"
        )
        is_good &= kills.is_clean and kills.finished == found["identical_samples"] == samples
    return is_good


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_evals.trials",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder for checkpoint, rows and runs")
    parser.add_argument("--trial", action="append", choices=TRIALS, help="only this one; may be repeated")
    parser.add_argument("--config", choices=("nano", "tiny"), default="nano")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.dir.exists() and any(arguments.dir.iterdir()):
        parser.error(f"--dir is {arguments.dir}, which holds files, expected an empty folder")
    from deepinfer_plugin.reference.tiny import write_checkpoint

    model = arguments.dir / arguments.config
    write_checkpoint(arguments.config, 0, model)
    try:
        with Server(model, arguments.dir / "server.log", free_port(), FLAGS) as server:
            say(f"healthy after {server.wait_until_healthy(START_S):.1f} s")
            return 0 if _trials(server, arguments, arguments.trial or list(TRIALS)) else 1
    except DeepInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(_main())
