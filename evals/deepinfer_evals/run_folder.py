"""The folder of a run: its manifest, its prompts, and journals of answers, judgements and sessions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_evals.benchmark import Question
from deepinfer_evals.endpoint import Answer
from deepinfer_evals.journal import read_lines
from deepinfer_evals.manifest import Manifest, differences
from deepinfer_plugin.errors import InputError

SHOWN = 8
# What a session that was killed at its start can leave: the log of its own server, and prompts.
BEFORE_THE_MANIFEST = {"server.log", "prompts.jsonl", "prompts.jsonl.partial", "manifest.json.partial"}

Key = tuple[str, int]  # question id, epoch from 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and contents of one run."""

    path: Path

    @property
    def answers_path(self) -> Path:
        """Journal of answers."""
        return self.path / "answers.jsonl"

    @property
    def judgements_path(self) -> Path:
        """Journal of the judge's replies."""
        return self.path / "judgements.jsonl"

    @property
    def sessions_path(self) -> Path:
        """Journal of program runs that worked on it: what was selected, when, with how many at once."""
        return self.path / "sessions.jsonl"

    @property
    def logs_path(self) -> Path:
        """inspect_ai's logs."""
        return self.path / "logs"

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            InputError: this is no run folder, or the manifest was changed.
        """
        if not (self.path / "manifest.json").exists():
            raise InputError(f"run folder: {self.path} holds no manifest.json, expected the --out of a run")
        return Manifest.read(self.path / "manifest.json")

    def questions(self) -> list[Question]:
        """Every question of the data set, in its order, as it was asked.

        Raises:
            InputError: a record cannot be read.
        """
        path = self.path / "prompts.jsonl"
        try:
            return [Question(**record) for record in read_lines(path)]
        except TypeError as error:
            raise InputError(f"run folder: a record of {path} is not whole ({error}); restore the file") from None

    def questions_of(self, answers: Mapping[Key, Answer]) -> dict[str, Question]:
        """The questions by id.

        Raises:
            InputError: one that has answers is not there, or a record cannot be read.
        """
        questions = {question.id: question for question in self.questions()}
        missing = sorted({key[0] for key in answers} - questions.keys())
        if missing:
            raise InputError(
                f"run folder: question {missing[0]} has answers but no prompt in {self.path}/prompts.jsonl, expected "
                "both; restore the files"
            )
        return questions

    def answers(self) -> dict[Key, Answer]:
        """The finished answers.

        Raises:
            InputError: a sample stands twice in the journal, or a record cannot be read.
        """
        found: dict[Key, Answer] = {}
        for record in read_lines(self.answers_path):
            try:
                key, answer = (str(record["question"]), int(record["epoch"])), Answer.from_json(record["answer"])
                answer.witness["all"]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"run folder: a record of {self.answers_path} is not whole ({error!r}), expected an answer with "
                    "its hashes; restore the file"
                ) from None
            if key in found:
                raise InputError(f"run folder: {self.answers_path} holds {key[0]} epoch {key[1]} twice, expected once")
            found[key] = answer
        return found

    def open(self, manifest: Manifest, questions: Sequence[Question]) -> bool:
        """Create the folder, or check that it may be continued; True where it was there.

        Raises:
            InputError: it belongs to another manifest; the text names what differs.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"run folder: --out {self.path} cannot be made ({error}); choose another") from None
        if (self.path / "manifest.json").exists():
            self._require_equal(self.manifest(), manifest)
            return True
        if {path.name for path in self.path.iterdir()} - BEFORE_THE_MANIFEST:
            raise InputError(f"run folder: --out {self.path} holds other files, expected an empty or a run's folder")
        lines = "".join(json.dumps(asdict(question)) + "\n" for question in questions)
        _write_whole(self.path / "prompts.jsonl", lines)
        _write_whole(
            self.path / "manifest.json", json.dumps(manifest.to_json(), indent=1) + "\n"
        )  # last: now it counts
        return False

    def _require_equal(self, there: Manifest, here: Manifest) -> None:
        if there.content_hash == here.content_hash:
            return
        found = [str(difference) for difference in differences(there.hashed, here.hashed)]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InputError(
            f"run folder: {self.path} was made under manifest {there.content_hash[:16]}…, this run has "
            f"{here.content_hash[:16]}…: {'; '.join(found[:SHOWN])}{more}; choose another --out"
        )


def write_text(path: Path, text: str) -> None:
    """Write a result whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
    except OSError as error:
        raise InputError(f"output: {path} cannot be written ({error}); choose another place") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; raises as ``write_text``."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="surrogatepass")
    partial.replace(path)
