"""Runs against a server that computes its answers: the same from any schedule, continued, refused, reported."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer_evals import mini
from deepinfer_evals.compare import comparison
from deepinfer_evals.conftest import Command
from deepinfer_evals.fake_server import FakeServer
from deepinfer_evals.journal import read_lines
from deepinfer_evals.kills import KilledRun
from deepinfer_evals.run_folder import RunFolder
from deepinfer_evals.runner import log_files
from deepinfer_evals.seeds import sample_seed

EPOCHS = 3


def _run(command: Command, server: FakeServer, rows: Path, out: Path, *more: object, code: int = 0) -> dict[str, Any]:
    line = ("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", out, "--epochs", EPOCHS)
    assert command(*line, *more) == code
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def test_schedules_and_splits_change_nothing(command: Command, rows: Path, tmp_path: Path) -> None:
    with FakeServer(delay_s=0.02) as server:
        whole = _run(command, server, rows, tmp_path / "a", "--concurrency", 9)
        assert server.most_in_flight > 4
        one = _run(command, server, rows, tmp_path / "b", "--concurrency", 1, "--limit", 5, "--order", "reverse")
        rest = _run(command, server, rows, tmp_path / "b", "--concurrency", 5, "--limit", "6-12", "--order", "shuffled")
    assert one["num_answers"] == 5 * EPOCHS
    assert rest["num_answers"] == 12 * EPOCHS
    assert rest["answers_hash"] == whole["answers_hash"]
    assert {name: rest[name] for name in ("score", "outcomes", "epochs")} == {
        name: whole[name] for name in ("score", "outcomes", "epochs")
    }
    assert 0.0 < whole["score"]["mean"] < 1.0
    found = comparison(RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"))
    assert found["identical_samples"] == found["shared_samples"] == 12 * EPOCHS
    seeds = [request["seed"] for request in server.requests if request["max_tokens"] > 1]
    assert sorted(seeds) == sorted(2 * [sample_seed(0, "aime2026", str(q), e) for q in range(1, 13) for e in (1, 2, 3)])


def test_a_drawn_sample_of_questions_hangs_on_the_seed_alone(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path
) -> None:
    first = _run(command, server, rows, tmp_path / "a", "--samples", 4, "--seed", 3)
    second = _run(command, server, rows, tmp_path / "b", "--samples", 4, "--seed", 3, "--order", "shuffled")
    other = _run(command, server, rows, tmp_path / "c", "--samples", 4, "--seed", 4)
    ids = [[question["id"] for question in report["questions"]] for report in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]
    assert first["answers_hash"] == second["answers_hash"]


def test_a_finished_sample_is_never_asked_again(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path
) -> None:
    _run(command, server, rows, tmp_path / "a")
    asked = len(server.requests)
    _run(command, server, rows, tmp_path / "a")
    assert len(server.requests) == asked + 1  # only whether the server answers
    assert len(log_files(RunFolder(tmp_path / "a"))) == 2


def test_another_manifest_is_refused_and_what_differs_is_named(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"
    line = ("run", "aime2026", "--base-url", server.base_url, "--out", out, "--data-dir")
    assert command(*line, rows) == 0
    before = (out / "answers.jsonl").read_bytes()
    mini.write_rows(tmp_path / "other", mini.aime_rows(11))
    changes: list[tuple[tuple[object, ...], str]] = [
        ((*line, rows, "--top-p", 0.9), "sampling.top_p: 0.95 there, 0.9 here"),
        ((*line, rows, "--seed", 1), "seeds.run_seed: 0 there, 1 here"),
        ((*line, tmp_path / "other"), "dataset.rows.12"),
    ]
    for words, text in changes:
        assert command(*words) == 2
        assert text in capsys.readouterr().err
    assert server.provenance is not None
    server.provenance["code"]["kernels.rope"] = "other"
    assert command(*line, rows) == 2
    assert "server.code.kernels.rope" in capsys.readouterr().err
    assert (out / "answers.jsonl").read_bytes() == before


def test_what_must_not_matter_is_not_hashed(command: Command, server: FakeServer, rows: Path, tmp_path: Path) -> None:
    first = _run(command, server, rows, tmp_path / "a")
    assert server.provenance is not None
    server.provenance["schedule"]["max_num_seqs"] = 99
    server.provenance["machine"]["memory_mib"] = 99
    assert _run(command, server, rows, tmp_path / "a")["manifest_hash"] == first["manifest_hash"]


def test_a_changed_manifest_file_is_refused(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(command, server, rows, tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"run_seed": 0', '"run_seed": 1'), encoding="utf-8")
    assert command("report", tmp_path / "a") == 2
    assert "was changed" in capsys.readouterr().err


def test_a_busy_server_is_asked_again_and_a_dead_one_leaves_the_run_to_be_continued(
    command: Command, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_evals.runner.MAX_RETRIES", 1)
    monkeypatch.setattr("deepinfer_evals.model_api.FIRST_WAIT_S", 0.01)
    with FakeServer() as server:
        server.failures_after = (5, 1)
        _run(command, server, rows, tmp_path / "a", "--concurrency", 1, "--limit", 3)
        server.failures_after = (len(server.requests) + 4, 10_000)
        report = _run(command, server, rows, tmp_path / "a", "--concurrency", 1, "--limit", 6, code=1)
        assert 3 * EPOCHS < report["num_answers"] < 6 * EPOCHS
        server.failures_after = (0, 0)
        assert _run(command, server, rows, tmp_path / "a", "--limit", 6)["num_answers"] == 6 * EPOCHS


def test_an_answer_drawn_with_another_seed_is_not_kept(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.seed_error = 1
    line = ("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", tmp_path / "a", "--limit", 2)
    assert command(*line) == 1
    assert RunFolder(tmp_path / "a").answers() == {}
    assert "was drawn with seed" in capsys.readouterr().out
    server.seed_error = 0
    assert command(*line) == 0


def test_a_report_says_what_it_leaves_out_and_whose_grader_it_is(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    assert _run(command, server, rows, out, "--limit", 5)["grader_is_the_runs"]
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "Only 5 of the benchmark's 30 questions" in text
    assert "prompts, sampling details and graders are not public" in text
    monkeypatch.setattr("deepinfer_evals.report.grader_hash", lambda name: name)
    assert command("report", out) == 0
    assert "The grader is not the one of the run" in (out / "report.html").read_text(encoding="utf-8")


def test_a_server_without_witness_gives_the_same_hashes(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path
) -> None:
    first = _run(command, server, rows, tmp_path / "a")
    server.has_witness = False
    server.provenance = None
    second = _run(command, server, rows, tmp_path / "b")
    assert second["answers_hash"] == first["answers_hash"]
    assert second["manifest_hash"] != first["manifest_hash"]


@pytest.mark.slow
def test_interrupts_keep_what_is_finished_and_say_so(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with FakeServer(delay_s=0.3) as server:
        words = ("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", out, "--concurrency", 2)
        line = [sys.executable, "-m", "deepinfer_evals", *map(str, words), "--epochs", "20"]
        finished = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
                while len(read_lines(out / "answers.jsonl")) < finished + 3:
                    time.sleep(0.05)
                process.send_signal(number)
                error = process.communicate(timeout=120)[1]
            assert process.returncode == 130
            assert error.splitlines() == ["stopped; finished answers are kept, the same command continues"]
            finished = len(RunFolder(out).answers())
    seeds = [request["seed"] for request in server.requests if request["max_tokens"] > 1]
    assert len(set(seeds)) <= len(seeds) <= len(set(seeds)) + 2  # those in flight at the first interrupt


# A program whose journal, when it is opened, first does something to its file.
FAULTY = """
import sys
from deepinfer_evals import journal
from deepinfer_evals.__main__ import main
enter = journal.Journal.__enter__
def broken(self):
    {fault}
    return enter(self)
journal.Journal.__enter__ = broken
sys.exit(main(sys.argv[1:]))
"""
FORGETS = "self.path.unlink(missing_ok=True)"
ALTERS = "self.path.exists() and self.path.write_bytes(self.path.read_bytes().replace(b'because', b'becausf', 1))"


@pytest.mark.slow
def test_kills_lose_nothing_and_repeat_nothing(command: Command, tmp_path: Path) -> None:
    rows = mini.write_rows(tmp_path / "rows", mini.aime_rows(12))
    out = tmp_path / "run"
    with FakeServer(delay_s=0.05) as server:
        line = ["run", "aime2026", "--base-url", server.base_url, "--data-dir", str(rows), "--out", str(out)]
        killed = KilledRun(server, [*line, "--epochs", "4", "--concurrency", "3"], out, 48)
        kills = killed.killed(3, seed=7, spread_s=0.2)
        reference = tmp_path / "whole"
        assert command(*line[:-1], reference, "--epochs", 4) == 0
    assert (kills.lost, kills.repeated, kills.finished) == (0, 0, 48)
    assert kills.while_asking >= 2
    assert comparison(RunFolder(out), RunFolder(reference))["identical_samples"] == 48


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "what"), [(FORGETS, "repeated"), (ALTERS, "lost")])
def test_a_faulty_journal_is_seen_by_the_trial_of_kills(fault: str, what: str, tmp_path: Path) -> None:
    rows = mini.write_rows(tmp_path / "rows", mini.aime_rows(12))
    out = tmp_path / "run"
    with FakeServer(delay_s=0.05) as server:
        line = ["run", "aime2026", "--base-url", server.base_url, "--data-dir", str(rows), "--out", str(out)]
        program = ("-c", FAULTY.format(fault=fault))
        kills = KilledRun(server, [*line, "--concurrency", "1"], out, 12, program).killed(2, seed=7, spread_s=0.2)
    assert getattr(kills, what) > 0
    assert kills.while_asking == 2
    assert not kills.is_clean


def test_a_choice_benchmark_is_run_and_reported(command: Command, server: FakeServer, tmp_path: Path) -> None:
    rows = mini.write_rows(tmp_path / "rows", mini.gpqa_rows(16))
    out = tmp_path / "run"
    line = ("run", "gpqa_diamond", "--base-url", server.base_url, "--data-dir", rows, "--out", out, "--epochs", 2)
    assert command(*line) == 0
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert 0 < report["outcomes"]["correct"] < 32
    assert report["truncated"]["count"] == report["outcomes"]["truncated"] > 0
    assert report["references"][0]["percent"] == 93.4
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "not public" in page
    assert "http://" not in page.replace(server.base_url, "")
    assert "cut by the length limit" in (out / "report.md").read_text(encoding="utf-8")


def test_a_judge_is_asked_once_for_each_answer(command: Command, tmp_path: Path) -> None:
    rows, out = mini.write_rows(tmp_path / "rows", mini.hle_rows(10)), tmp_path / "run"
    with FakeServer() as server, FakeServer() as judge:
        line = ("run", "hle", "--base-url", server.base_url, "--data-dir", rows, "--out", out, "--epochs", 2)
        named = ("--judge-url", judge.base_url, "--judge-model", "fake")
        assert command(*line) == 2
        assert command(*line, *named) == 0
        asked = len(judge.requests)
        assert {(request["seed"], request["temperature"]) for request in judge.requests} == {(0, 0.0)}
        assert command(*line, *named) == 0
        assert command("report", out) == 0
        assert len(judge.requests) == asked > 8
        assert command(*line, *named, "--judge-seed", 1) == 2
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    whole = {(key[0], answer.text) for key, answer in RunFolder(out).answers().items() if not answer.is_truncated}
    assert asked == len(read_lines(out / "judgements.jsonl")) == len(whole)
    assert report["outcomes"]["correct"] + report["outcomes"]["wrong"] + report["outcomes"]["truncated"] == 16
    assert report["outcomes"]["correct"] > 0
    assert report["outcomes"]["wrong"] > 0
    assert report["outcomes"]["unjudged"] == 0
    assert "2,158 of 2,500" in report["note"]


def test_a_dead_judge_loses_no_answer(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_evals.judge.FIRST_WAIT_S", 0.001)
    rows, out = mini.write_rows(tmp_path / "rows", mini.hle_rows(5)), tmp_path / "run"
    with FakeServer() as server, FakeServer() as judge:
        line = ("run", "hle", "--base-url", server.base_url, "--data-dir", rows, "--out", out, "--judge-model", "fake")
        judge.failures_after = (0, 10_000)
        assert command(*line, "--judge-url", judge.base_url) == 1
        asked = len(server.requests)
        assert len(RunFolder(out).answers()) == 4
        judge.failures_after = (0, 0)
        assert command(*line, "--judge-url", judge.base_url) == 0
        assert len(server.requests) == asked + 1


@pytest.mark.parametrize(("words", "text"), [
    (("--concurrency", "0"), "--concurrency is 0"),
    (("--limit", "9-3"), "--limit is '9-3'"),
    (("--limit", "99-100"), "selects no question"),
    (("--epochs", "0"), "--epochs is 0"),
    (("--effort", "101"), "--effort is 101"),
    (("--effort", "x"), "--effort is 'x'"),
    (("--top-p", "0"), "--top-p is 0.0"),
    (("--extra-body", "{"), "--extra-body is no JSON"),
    (("--extra-body", '{"seed": 1}'), "field 'seed'"),
    (("--model-name", "none"), "expected one that"),
    (("--judge-url", "http://127.0.0.1:9"), "graded by rules"),
    (("--certificate", "none.json"), "cannot be read"),
    (("--base-url", "http://127.0.0.1:9"), "cannot be reached"),
    (("--", "--max-model-len=64"), "--max-model-len=64 after --"),
])  # fmt: skip
def test_bad_words_end_in_one_error(
    words: tuple[str, ...], text: str, command: Command, server: FakeServer, rows: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = ("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", tmp_path / "a")
    assert command(*line, *words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "a" / "answers.jsonl").exists()


def test_a_session_that_ended_before_its_manifest_is_begun_again(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a"
    out.mkdir()
    for name in ("server.log", "prompts.jsonl", "manifest.json.partial"):
        (out / name).write_text("{", encoding="utf-8")
    assert command("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", out) == 0
    assert len(RunFolder(out).questions()) == 12


def test_a_folder_of_something_else_is_left_alone(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a"
    out.mkdir()
    (out / "thesis.tex").write_text("x", encoding="utf-8")
    assert command("run", "aime2026", "--base-url", server.base_url, "--data-dir", rows, "--out", out) == 2
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_runs_of_two_benchmarks_or_without_shared_samples_are_not_compared(
    command: Command, server: FakeServer, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(command, server, rows, tmp_path / "a", "--limit", 2)
    _run(command, server, rows, tmp_path / "b", "--limit", "3-4")
    assert command("compare", tmp_path / "a", tmp_path / "b") == 2
    assert "share no finished sample" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "b")
    assert command("compare", tmp_path / "a", tmp_path / "b") == 2
