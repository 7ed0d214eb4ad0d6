"""``offline`` without an engine: killed at random moments it loses and doubles nothing; bad arguments are one line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.__main__ import main

NUM_PROMPTS, NUM_KILLS = 300, 20

# The real program, store and arguments; only the engine is replaced, by one that answers every few milliseconds and
# writes down what it was asked. Each fourth answer comes late, so that the order of answers is not that of prompts.
PROGRAM = """
import sys, time
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.offline import run

def answer(llm, plan, prompts):
    held = []
    for number, prompt in enumerate(prompts):
        time.sleep(0.004)
        with open(sys.argv[1], "a") as log:
            log.write(prompt.name + "\\n")
        held.append(prompt)
        if number % 4 != 3:
            yield held[-1], {"id": held[-1].name, "text": "answer to " + held.pop().messages[0]["content"]}
    for prompt in held:
        yield prompt, {"id": prompt.name, "text": "answer to " + prompt.messages[0]["content"]}

run.build_engine = lambda plan: None
run.answer = answer
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def arguments(checkpoint: Callable[..., Path], tmp_path: Path) -> list[str]:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": f"p{i}/ü", "prompt": f"question {i}"}) for i in range(NUM_PROMPTS)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return [
        "offline",
        "--model",
        str(checkpoint("nano", 0)),
        "--input",
        str(path),
        "--out",
        str(tmp_path / "out.jsonl"),
    ]


def start(tmp_path: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "asked"), *arguments]
    log = open(tmp_path / "log", "ab")  # noqa: SIM115, the child's
    environment = envs.child_environment({"CUDA_VISIBLE_DEVICES": ""})
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def test_a_program_killed_at_random_moments_loses_and_doubles_nothing(tmp_path: Path, arguments: list[str]) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    draw = random.Random(7)
    kills, kept_at_a_kill = 0, set()
    while kills < NUM_KILLS:
        before = len(list(partial.glob("*.jsonl")))
        process = start(tmp_path, arguments)
        while process.poll() is None and len(list(partial.glob("*.jsonl"))) == before:
            time.sleep(0.01)  # until it has stored something, so that a kill meets its work and not its start
        time.sleep(draw.uniform(0, 0.08))
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.kill()
        process.wait()
        kills += 1
        kept_at_a_kill.add(len(list(partial.glob("*.jsonl"))))
    assert not out.exists()
    assert len(kept_at_a_kill) == NUM_KILLS  # every run went on
    last = start(tmp_path, arguments)
    assert last.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert answers == [{"id": f"p{i}/ü", "text": f"answer to question {i}"} for i in range(NUM_PROMPTS)]
    assert not partial.exists()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert set(asked) == {f"p{i}/ü" for i in range(NUM_PROMPTS)}
    assert len(asked) > NUM_PROMPTS  # what a kill took was asked again
    again = start(tmp_path, arguments)
    assert again.wait(timeout=60) == 0
    assert len((tmp_path / "asked").read_text().splitlines()) == len(asked)


def test_an_interrupt_keeps_what_is_finished_and_says_so(tmp_path: Path, arguments: list[str]) -> None:
    process = start(tmp_path, arguments)
    partial = tmp_path / "out.jsonl.partial"
    while process.poll() is None and len(list(partial.glob("*.jsonl"))) < 5:
        time.sleep(0.01)
    process.send_signal(2)
    assert process.wait(timeout=60) == 130
    assert f"of {NUM_PROMPTS} answers are kept, the same command goes on" in (tmp_path / "log").read_text()


def test_a_sidecar_left_behind_a_complete_output_is_removed(tmp_path: Path, arguments: list[str]) -> None:
    assert start(tmp_path, arguments).wait(timeout=120) == 0
    (tmp_path / "out.jsonl.partial").mkdir()
    assert main(arguments) == 0
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_other_inputs_are_not_mixed_in(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, arguments).wait(timeout=120) == 0
    capsys.readouterr()
    assert main([*arguments, "--temperature", "0.5"]) == 2
    assert "offline: output" in (error := capsys.readouterr().err)
    assert "has sampling" in error
    (tmp_path / "out.jsonl.manifest.json").unlink()
    assert main(arguments) == 2
    assert "was not written by offline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--temperature", "-1"], "--temperature is -1.0, expected a number from 0 to 2"),
        (["--top-p", "0"], "--top_p is 0.0, expected"),
        (["--top-k", "0"], "--top_k is 0, expected"),
        (["--max-tokens", "0"], "--max_tokens is 0, expected an integer, 1 or more"),
        (["--seed", str(1 << 63)], "--seed is"),
        (["--tp", "0"], "--tp is 0, expected 1 or more"),
        (["--dp", "0"], "--dp is 0, expected 1 or more"),
        (["--ep", "0"], "--ep is 0, expected 1 or more"),
        (["--ep", "3", "--tp", "2"], "--ep is 3, expected 2, the product of --tp 2 and --dp 1"),
        (["--input", "/none"], "the input cannot be read"),
        (["--out", "/proc/no/such"], "--out is /proc/no/such, which cannot be written"),
        (["--model", "/none"], "the checkpoint is /none, which has no config.json"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(
    arguments: list[str], flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *flags]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_the_folder_comes_from_the_variable_and_must_agree_with_the_flag(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deepinfer_plugin.cli.model_folder import model_folder
    from deepinfer_plugin.errors import SettingError

    nano = checkpoint("nano", 0)
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    with pytest.raises(SettingError, match="--model is missing; name a folder, or set DEEPINFER_HF_MODEL_DIR"):
        model_folder("offline", None)
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(nano))
    assert model_folder("offline", None) == nano
    assert model_folder("offline", nano / ".") == nano
    with pytest.raises(SettingError, match=rf"--model is {tmp_path}, but DEEPINFER_HF_MODEL_DIR is '{nano}'"):
        model_folder("offline", tmp_path)


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({}, ()),
        ({"tp": 2}, ("--tensor-parallel-size=2",)),
        ({"ep": 4}, ("--data-parallel-size=4", "--enable-expert-parallel")),
        (
            {"ep": 4, "tp": 2, "dp": 2},
            ("--tensor-parallel-size=2", "--data-parallel-size=2", "--enable-expert-parallel"),
        ),
        ({"dp": 2}, ("--data-parallel-size=2",)),
    ],
)
def test_sizes_are_passed_on(sizes: dict[str, int], flags: tuple[str, ...]) -> None:
    from argparse import Namespace

    from deepinfer_plugin.cli.model_folder import size_flags

    assert size_flags("offline", Namespace(**{"tp": 1, "dp": 1, "ep": 1, **sizes})) == flags
