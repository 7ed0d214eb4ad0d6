"""Kill a run again and again at random moments, then let it finish, and count what was lost and what was repeated."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals.fake_server import FakeServer
from deepinfer_evals.journal import read_lines
from deepinfer_evals.run_folder import RunFolder
from deepinfer_evals.seeds import sample_seed
from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import EngineError, SettingError

PROGRAM = ("-m", "deepinfer_evals")
STARTING_SHARE = 0.2  # of the kills come before the first question is asked
STARTING_S = 10.0  # importing, reading rows and looking at the server take about so long
SAMPLES_PER_KILL = 3  # fewer, and the program might end before it is killed
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

    @property
    def is_clean(self) -> bool:
        """Nothing was lost or repeated, and some kills hit the program while it asked."""
        return self.lost == self.repeated == 0 and self.while_asking > 0


class KilledRun:
    """One run of ``samples`` samples into ``out``, whose program is killed.

    Args:
        server: sees every request.
        line: command line of the run.
        out: its folder.
        samples: of the run.
        program: Python's arguments before the line; a test plants a fault there.
    """

    def __init__(
        self, server: FakeServer, line: Sequence[str], out: Path, samples: int, program: Sequence[str] = PROGRAM
    ) -> None:
        self._server = server
        self._command = [sys.executable, *program, *line]
        self._benchmark = line[1]
        self._folder = RunFolder(out)
        self._samples = samples

    def killed(self, kills: int, seed: int, spread_s: float) -> Kills:
        """Start the program, kill it with SIGKILL at a random moment, so many times, then let it finish.

        Args:
            kills: how often.
            seed: of the moments.
            spread_s: a kill comes up to so long after an answer; as long as an answer takes hits every moment of one.

        Raises:
            SettingError: there are too few samples for so many kills.
            EngineError: the program ended by itself, or no answer came.
        """
        if self._samples < SAMPLES_PER_KILL * kills:
            raise SettingError(
                f"killed run: kills is {kills} for {self._samples} samples, expected at most one for each "
                f"{SAMPLES_PER_KILL}; ask more questions or epochs"
            )
        assert not self._folder.path.exists(), f"{self._folder.path} is there, expected a run that nobody began"
        moments = random.Random(seed)
        before: list[dict[str, Any]] = []
        lost = repeated = while_asking = 0
        for number in range(kills):
            first_request = len(self._server.requests)
            share = (self._samples - len(before)) // (kills - number + 1)
            while_asking += self._kill_one(moments, len(before), share, spread_s)
            after = read_lines(self._folder.answers_path)
            repeated += self._repeated(first_request, before)
            lost += _lost(before, after)
            say(f"kill {number + 1} of {kills}: {len(after)} of {self._samples} samples on the disk, {lost} lost")
            before = after
        first_request = len(self._server.requests)
        code = subprocess.run(self._command, stdout=subprocess.DEVNULL).returncode
        if code != 0:
            raise EngineError(f"killed run: the last start ended with {code}, expected 0; see its message above")
        after = read_lines(self._folder.answers_path)
        known = self._seeds(after)
        asked = [request["seed"] for request in self._server.requests if request["seed"] in known]
        return Kills(
            kills=kills,
            while_asking=while_asking,
            finished=len(after),
            lost=lost + _lost(before, after),
            repeated=repeated + self._repeated(first_request, before),
            asked_again=len(asked) - len(set(asked)),
        )

    def _kill_one(self, moments: random.Random, stored: int, share: int, spread_s: float) -> bool:
        """One start and one kill, after at most ``share`` more answers; whether it hit the program while it asked."""
        is_at_start = moments.random() < STARTING_SHARE
        starting_s, more_s = moments.random() * STARTING_S, moments.random() * spread_s
        target = stored + moments.randint(0, share)
        first_request = len(self._server.requests)

        def is_asking() -> bool:
            return len(self._server.requests) > first_request + 1  # the first one asks whether the server answers

        def answers() -> int:
            return len(read_lines(self._folder.answers_path))

        with subprocess.Popen(self._command, stdout=subprocess.DEVNULL) as process:
            begin_s = time.monotonic()

            def has_passed(wait_s: float) -> bool:
                return time.monotonic() - begin_s >= wait_s

            if is_at_start:
                while not has_passed(starting_s) and not is_asking() and process.poll() is None:
                    time.sleep(POLL_S)
            else:
                while not (is_asking() and answers() >= target) and process.poll() is None:
                    if has_passed(WAIT_S):
                        process.kill()
                        raise EngineError(f"killed run: no answer came within {WAIT_S:.0f} s")
                    time.sleep(POLL_S)
                begin_s = time.monotonic()
                while not has_passed(more_s) and answers() < stored + share and process.poll() is None:
                    time.sleep(POLL_S)
            hit = is_asking()
            process.send_signal(signal.SIGKILL)
            code = process.wait()
        if code != -signal.SIGKILL:
            raise EngineError(f"killed run: the program ended with {code} before it was killed; ask more of it")
        return hit

    def _repeated(self, first_request: int, before: Sequence[dict[str, Any]]) -> int:
        known = self._seeds(before)
        return sum(request["seed"] in known for request in self._server.requests[first_request:])

    def _seeds(self, records: Sequence[dict[str, Any]]) -> set[int]:
        return {sample_seed(0, self._benchmark, record["question"], record["epoch"]) for record in records}


def _lost(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> int:
    """Records of before that are not there, or are another, or stand there twice."""
    return sum(after.count(record) != 1 for record in before)
