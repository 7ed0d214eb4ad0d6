"""``offline`` with the engine on the nano checkpoint: the answers of a stopped run are those of one that was not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.answer_provenance import weights_identity

TIMEOUT_S = 400
LINES: list[dict[str, Any]] = [
    {"id": "chat", "prompt": "the quick brown fox"},
    {"id": "again", "prompt": "the quick brown fox"},
    {"id": "other seed", "prompt": "the quick brown fox", "seed": 1},
    {"id": "greedy", "messages": [{"role": "user", "content": "lazy dog"}], "temperature": 0, "max_tokens": 3},
    {"id": "too long", "prompt": "fox " * 4000},
    *({"id": f"more {i}", "prompt": f"number {i}", "max_tokens": 4 + i % 7} for i in range(40)),
]
FLAGS = ("--max-tokens", "8", "--token-ids", "--provenance", "--", "--max-model-len", "1024")
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_plugin", "offline", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=envs.child_environment(VARIABLES),
        check=False,
    )


def paths(nano: Path, folder: Path) -> list[str]:
    """Arguments for a run in ``folder``, with its input written."""
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    return ["--model", str(nano), "--input", str(folder / "in.jsonl"), "--out", str(folder / "out.jsonl")]


@pytest.fixture(scope="module")
def nano(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nano", 0)


@pytest.fixture(scope="module")
def answers(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("offline")
    result = run(*paths(nano, folder), *FLAGS)
    assert result.returncode == 1, result.stderr[-3000:]  # one prompt was refused
    assert f"{len(LINES)} answers -> " in result.stdout
    assert "1 of them are errors" in result.stdout
    assert f"{len(LINES)}/{len(LINES)}" in result.stderr  # the progress bar
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [line["id"] for line in LINES]
    return {line["id"]: line for line in lines}


def test_a_prompt_that_is_too_long_is_an_error_of_its_own(answers: dict[str, dict[str, Any]]) -> None:
    assert set(answers["too long"]) == {"id", "error"}
    assert "1024" in answers["too long"]["error"]
    assert all("error" not in answer for name, answer in answers.items() if name != "too long")


def test_an_answer_depends_on_prompt_and_seed_alone(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["chat"]["token_ids"] == answers["again"]["token_ids"]
    assert answers["chat"]["token_ids"] != answers["other seed"]["token_ids"]
    assert answers["chat"]["prompt_token_ids"] == answers["other seed"]["prompt_token_ids"]
    assert (answers["chat"]["seed"], answers["other seed"]["seed"]) == (0, 1)
    assert (answers["greedy"]["seed"], answers["greedy"]["num_tokens"]) == (0, 3)


def test_an_answer_says_what_it_depends_on(answers: dict[str, dict[str, Any]], nano: Path) -> None:
    found = answers["other seed"]["provenance"]
    assert found["seed"] == 1
    assert found["weights"] == weights_identity(nano)
    assert (found["kernel_set"], found["drafts_used"]) == ("reference", 0)
    assert found["replay"] == {"decoder": "compact:140", "encoder": "exact"}


def test_a_raw_prompt_through_the_variable_gets_no_chat_around_it(
    nano: Path, tmp_path: Path, answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("the quick brown fox\n", encoding="utf-8")
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(nano))
    drafts = ("--speculative-config", json.dumps({"method": "dspark", "num_speculative_tokens": 2}))
    options = ("--raw", "--max-tokens", "9", "--token-ids", "--temperature", "0", "--draft-facts")
    flags = (*options, "--", "--max-model-len", "1024", *drafts)
    result = run("--input", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.jsonl"), *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    [answer] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answer["id"] == "line-1"
    assert 0 < answer["num_prompt_tokens"] < answers["chat"]["num_prompt_tokens"]
    assert "provenance" not in answer
    first, *steps = answer["draft_facts"]
    assert first["drafted"] == 0
    assert all(step["verified"] == step["drafted"] == len(step["confidence_score"]) for step in steps)
    assert sum(1 + step["accepted"] for step in (first, *steps)) >= answer["num_tokens"] > len(steps)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_answers_of_one_that_was_not(
    nano: Path, tmp_path: Path, answers: dict[str, dict[str, Any]]
) -> None:
    arguments = paths(nano, tmp_path)
    command = [sys.executable, "-m", "deepinfer_plugin", "offline", *arguments, *FLAGS]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=envs.child_environment(VARIABLES))
        while process.poll() is None and len(list((tmp_path / "out.jsonl.partial").glob("*.jsonl"))) < 5:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -9, (tmp_path / "log").read_text()[-3000:]
    kept = len(list((tmp_path / "out.jsonl.partial").glob("*.jsonl")))
    assert 5 <= kept < len(LINES)
    result = run(*arguments, *FLAGS)
    assert "answers -> " in result.stdout, result.stderr[-3000:]
    assert f"{kept}/{len(LINES)}" in result.stderr  # the bar begins at what was kept
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == list(answers.values())
