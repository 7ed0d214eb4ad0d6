"""Trials of the whole program against a server: the same answers from other schedules, and nothing lost to a kill.

Tests run them small, ``python -m deepinfer_evals.trials`` runs them at any size on a small random checkpoint.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals import mini
from deepinfer_evals.__main__ import main
from deepinfer_evals.compare import comparison
from deepinfer_evals.fake_server import FakeServer
from deepinfer_evals.journal import read_lines
from deepinfer_evals.relay import Relay
from deepinfer_evals.run_folder import RunFolder
from deepinfer_evals.seeds import sample_seed
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.server import Server, free_port

BENCHMARK = "aime2026"
# Random weights write noise: an answer in this form makes scores that are neither 0 nor 1.
FORM = r'{"structured_outputs": {"regex": "[a-z ]{10,40}\\\\boxed\\{[0-3]\\}"}}'
FLAGS = (
    "--served-model-name=served",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--reasoning-parser=deepseek_v41",
)
START_S = 900.0
POLL_S = 0.02
WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """What happened to a run that was killed again and again.

    Attributes:
        kills: how often; ``while_asking`` of them while answers were on their way.
        finished: samples at the end.
        lost: samples that were on the disk at some kill and are not, or not the same, at the end.
        repeated: requests for a sample that was on the disk when the program that sent them started.
        asked_again: requests above one for each sample: those in flight at a kill, which had no answer yet.
    """

    kills: int
    while_asking: int
    finished: int
    lost: int
    repeated: int
    asked_again: int


def words(base_url: str, rows: Path, out: Path, *more: object) -> list[str]:
    """Command line of a run with short answers in ``FORM``."""
    fixed = ("--max-tokens", 64, "--effort", 0, "--extra-body", FORM)
    line = ("run", BENCHMARK, "--base-url", base_url, "--data-dir", rows, "--out", out, *fixed, *more)
    return [str(word) for word in line]


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
        code = main(line)
        assert code == 0, f"{' '.join(line)} ended with {code}"
    return comparison(RunFolder(first), RunFolder(second))


def killed_run(server: FakeServer, line: Sequence[str], out: Path, samples: int, kills: int, seed: int) -> Kills:
    """Start the program, kill it with SIGKILL at a random moment, again and again, then let it finish.

    Args:
        server: sees every request.
        line: command line of a run into ``out``.
        out: folder of the run.
        samples: of the run.
        kills: how often.
        seed: of the moments.
    """
    assert not out.exists(), f"{out} is there, expected a run that nobody began"
    moments = random.Random(seed)
    folder = RunFolder(out)
    before: list[dict[str, Any]] = []
    lost = repeated = while_asking = done = 0
    while done < kills:
        target = len(before) + moments.randint(0, max(1, (samples - len(before)) // (kills - done + 1) * 2))
        first_request = len(server.requests)
        with subprocess.Popen([sys.executable, "-m", "deepinfer_evals", *line], stdout=subprocess.DEVNULL) as process:
            is_asking = _wait(process, server, folder, min(target, samples - 1), first_request)
            time.sleep(moments.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "the program ended before it was killed; ask more of it"
        done, while_asking = done + 1, while_asking + is_asking
        repeated += _repeated(server, first_request, before)
        lost += _lost(before, read_lines(folder.answers_path))
        before = read_lines(folder.answers_path)
    first_request = len(server.requests)
    code = subprocess.run([sys.executable, "-m", "deepinfer_evals", *line], stdout=subprocess.DEVNULL).returncode
    assert code == 0, f"the last start ended with {code}"
    repeated += _repeated(server, first_request, before)
    after = read_lines(folder.answers_path)
    known = _seeds(after)
    asked = [request["seed"] for request in server.requests if request["seed"] in known]
    return Kills(
        kills=done,
        while_asking=while_asking,
        finished=len(after),
        lost=lost + _lost(before, after),
        repeated=repeated,
        asked_again=len(asked) - len(set(asked)),
    )


def _wait(
    process: subprocess.Popen[bytes], server: FakeServer, folder: RunFolder, target: int, first_request: int
) -> bool:
    """Until ``target`` answers are on the disk; whether the program had asked for answers by then."""
    begin_s = time.monotonic()
    while len(read_lines(folder.answers_path)) < target and process.poll() is None:
        assert time.monotonic() - begin_s < WAIT_S, "no answer came"
        time.sleep(POLL_S)
    return len(server.requests) > first_request + 1  # the first one asks whether the server answers


def _lost(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> int:
    """Records of before that are not there, or are another, or stand there twice."""
    return sum(after.count(record) != 1 for record in before)


def _repeated(server: FakeServer, first_request: int, before: Sequence[dict[str, Any]]) -> int:
    known = _seeds(before)
    return sum(request["seed"] in known for request in server.requests[first_request:])


def _seeds(records: Sequence[dict[str, Any]]) -> set[int]:
    return {sample_seed(0, BENCHMARK, record["question"], record["epoch"]) for record in records}


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deepinfer_evals.trials", description=str(__doc__))
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder for checkpoint, rows and runs")
    parser.add_argument("--config", choices=("nano", "tiny"), default="nano")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    from deepinfer_plugin.reference.tiny import write_checkpoint

    model = arguments.dir / arguments.config
    write_checkpoint(arguments.config, 0, model)
    with Server(model, arguments.dir / "server.log", free_port(), FLAGS) as server:
        say(f"healthy after {server.wait_until_healthy(START_S):.1f} s")
        begin_s = time.monotonic()
        found = two_schedules(server.base_url, arguments.dir, arguments.questions, arguments.epochs)
        say(
            f"two schedules in {time.monotonic() - begin_s:.0f} s: {found['identical_samples']} of "
            f"{found['shared_samples']} samples identical, {found['verdicts_moved']} verdicts moved; "
            f"{found['conclusion']}"
        )
        if not arguments.kills:
            return 0
        begin_s = time.monotonic()
        with Relay(server.base_url) as relay:
            rows, out = arguments.dir / "rows", arguments.dir / "killed"
            line = words(relay.base_url, rows, out, "--epochs", arguments.epochs, "--concurrency", 8)
            say(str(killed_run(relay, line, out, arguments.questions * arguments.epochs, arguments.kills, 1)))
        found = comparison(RunFolder(arguments.dir / "whole"), RunFolder(out))
        say(
            f"killed run in {time.monotonic() - begin_s:.0f} s: {found['identical_samples']} of "
            f"{found['shared_samples']} samples identical with the whole run; {found['conclusion']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
