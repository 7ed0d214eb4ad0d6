"""What a new user gets wrong, and run folders that were damaged: one line, exit code 2, nothing asked or changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_evals import mini
from deepinfer_evals.canonical import hash_of
from deepinfer_evals.conftest import Command
from deepinfer_evals.fake_server import FakeServer

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def out(command: Command, server: FakeServer, rows: Path, tmp_path: Path) -> Path:
    """A finished run of twelve samples."""
    folder = tmp_path / "run"
    assert command("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", folder) == 0
    return folder


@pytest.mark.parametrize(("words", "text"), [
    ((), "COMMAND"),
    (("run", "mmlu", "--base-url", NOBODY), "invalid choice: 'mmlu'"),
    (("run", "aime2026"), "--base-url --model is required"),
    (("run", "aime2026", "--base-url", NOBODY, "--model", "x"), "not allowed with"),
    (("run", "aime2026", "--base-url", NOBODY, "--epochs", "x"), "invalid int value: 'x'"),
    (("compare", "a"), "required: B"),
])  # fmt: skip
def test_wrong_words_end_in_one_line(
    words: tuple[str, ...], text: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("url", "text"), [
    (NOBODY, "cannot be reached"),
    ("localhost:8000", "expected http://HOST:PORT"),
    ("http://", "expected http://HOST:PORT"),
])  # fmt: skip
def test_a_server_or_a_judge_that_cannot_be_asked_is_named_by_its_flag(
    url: str, text: str, command: Command, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = mini.write_rows(tmp_path / "hle", mini.hle_rows(3))
    line = ("run", "hle", "--data-dir", rows, "--out", tmp_path / "a", "--judge-model", "fake")
    for flag, words in (
        ("--base-url", ("--base-url", url, "--judge-url", server.base_url)),
        ("--judge-url", ("--base-url", server.base_url, "--judge-url", url)),
    ):
        assert command(*line, *words) == 2
        error = capsys.readouterr().err
        assert text in error
        assert flag in error
        assert len(error.splitlines()) == 1
    assert server.requests == []
    assert not (tmp_path / "a").exists()


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """Damage that keeps the hash right."""

    def damage(text: str) -> str:
        value = json.loads(text)
        change(value["hashed"])
        value["content_hash"] = hash_of(value["hashed"])
        return json.dumps(value)

    return damage


@pytest.mark.parametrize(("name", "damage", "text"), [
    ("manifest.json", lambda text: text[:300], "cannot be read"),
    ("manifest.json", lambda _: "[]", "cannot be read"),
    ("manifest.json", _manifest(lambda hashed: hashed["benchmark"].update(name="mmlu")), "benchmark is 'mmlu'"),
    ("manifest.json", _manifest(lambda hashed: hashed.pop("prompts")), "has no prompts"),
    ("manifest.json", None, "holds no manifest.json"),
    ("prompts.jsonl", lambda text: text[:700], "has answers but no prompt"),
    ("prompts.jsonl", None, "has answers but no prompt"),
    ("prompts.jsonl", lambda text: text.replace('"gold"', '"golt"'), "prompts.jsonl is not whole"),
    ("prompts.jsonl", lambda text: "[1]\n" + text, "prompts.jsonl is not whole"),
    ("answers.jsonl", lambda text: text.replace('"epoch"', '"epoc"'), "answers.jsonl is not whole"),
    ("answers.jsonl", lambda text: text.replace('"all"', '"al"'), "answers.jsonl is not whole"),
    ("answers.jsonl", lambda text: text.replace('"question":"3"', '"question":"99"'), "question 99 has answers"),
    ("answers.jsonl", lambda text: text + text, "twice, expected once"),
    ("answers.jsonl", lambda text: "xx\n" + text, "no whole JSON"),
])  # fmt: skip
def test_a_damaged_run_folder_is_named_and_left_alone(
    name: str, damage: Callable[[str], str] | None, text: str, command: Command, server: FakeServer, out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = out / name
    if damage is None:
        path.unlink()
    else:
        before = path.read_text(encoding="utf-8")
        path.write_text(damage(before), encoding="utf-8")
        assert path.read_text(encoding="utf-8") != before
    files = {file: file.read_bytes() for file in out.iterdir() if file.is_file()}
    asked = len(server.requests)
    capsys.readouterr()
    for line in (("report", out), ("verify", out, "--base-url", server.base_url), ("compare", out, out)):
        assert command(*line) == 2
        error = capsys.readouterr().err
        assert text in error
        assert len(error.splitlines()) == 1
    assert len(server.requests) == asked
    assert {file: file.read_bytes() for file in out.iterdir() if file.is_file()} == files
