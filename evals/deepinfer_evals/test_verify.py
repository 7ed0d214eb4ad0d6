"""``verify`` names what was planted: a sampling parameter, a byte of a prompt, a kernel; ``doctor`` tries the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_evals import benchmark, mini
from deepinfer_evals.canonical import hash_of
from deepinfer_evals.conftest import Command
from deepinfer_evals.fake_server import PROVENANCE, FakeServer
from deepinfer_evals.graders import integer
from deepinfer_evals.trials import BENCHMARK

NUM = 24
Verified = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def out(command: Command, server: FakeServer, rows: Path, tmp_path: Path) -> Path:
    """A finished run of 24 samples."""
    folder = tmp_path / "run"
    line = ("run", BENCHMARK, "--base-url", server.base_url, "--data-dir", rows, "--out", folder, "--epochs", 2)
    assert command(*line) == 0
    return folder


@pytest.fixture
def verified(
    command: Command, server: FakeServer, out: Path, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """``verified(*words)``: exit code and findings of a verification of everything."""

    def verify(*words: object) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "found.json"
        code = command("verify", out, "--base-url", server.base_url, "--all", "--out", path, *words)
        return code, json.loads(path.read_text(encoding="utf-8"))

    return verify


def test_an_honest_server_is_identical(verified: Verified) -> None:
    code, found = verified("--concurrency", 3)
    assert code == 0
    assert found["is_identical"]
    assert len(found["asked"]) == NUM


def test_a_part_is_drawn_by_its_choice(command: Command, server: FakeServer, out: Path, tmp_path: Path) -> None:
    asked = []
    for choice in ("x", "x", "y"):
        path = tmp_path / "found.json"
        words = ("--part", 5, "--choice", choice, "--out", path)
        assert command("verify", out, "--base-url", server.base_url, *words) == 0
        asked.append(json.loads(path.read_text(encoding="utf-8"))["asked"])
    assert asked[0] == asked[1] != asked[2]
    assert len(asked[0]) == 5


def test_a_changed_sampling_parameter_is_named(verified: Verified) -> None:
    code, found = verified("--override", '{"temperature": 0.99}')
    assert code == 1
    assert [one["path"] for one in found["manifest_differences"]] == ["sampling.temperature"]
    assert len(found["sample_differences"]) == NUM
    assert "sampling (sampling.temperature)" in found["conclusion"]


def test_a_changed_byte_of_the_template_is_named(
    verified: Verified, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (benchmark.PROMPTS / f"{BENCHMARK}.txt").read_text(encoding="utf-8")
    (tmp_path / f"{BENCHMARK}.txt").write_text(text.replace("Work", "work"), encoding="utf-8")
    monkeypatch.setattr(benchmark, "PROMPTS", tmp_path)
    code, found = verified("--data-dir", rows)
    assert code == 1
    assert "prompts.template" in [one["path"] for one in found["manifest_differences"]]
    assert "differs at byte" in found["findings"][0]
    assert "b'Work it out" in found["findings"][0]
    assert len(found["sample_differences"]) == NUM


def test_a_changed_byte_of_a_stored_prompt_is_named(verified: Verified, out: Path) -> None:
    path = out / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[6] = lines[6].replace("What is 7", "What is 6", 1)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    code, found = verified()
    assert code == 1
    assert "the prompt of question 7 " in found["findings"][0]
    assert found["conclusion"].endswith("differ in prompts (prompts.questions.7)")
    assert {one["key"][0] for one in found["sample_differences"]} == {"7"}


def test_a_changed_row_is_named(verified: Verified, tmp_path: Path) -> None:
    changed = mini.aime_rows(12)
    changed[3]["answer"] = 999
    code, found = verified("--data-dir", mini.write_rows(tmp_path / "changed", changed))
    assert code == 1
    assert "dataset.rows.4" in [one["path"] for one in found["manifest_differences"]]
    assert found["sample_differences"] == []


def test_a_changed_kernel_is_named(verified: Verified, server: FakeServer) -> None:
    assert server.provenance is not None
    server.provenance["code"]["kernels.linear"] = "f" * 16
    server.mistake = lambda text: text + "x"
    code, found = verified()
    assert code == 1
    assert [one["path"] for one in found["manifest_differences"]] == ["server.code.kernels.linear"]
    assert "engine (server.code.kernels.linear)" in found["conclusion"]
    assert len(found["sample_differences"]) == NUM


def test_an_engine_that_differs_where_no_manifest_can_see_it_is_said(verified: Verified, server: FakeServer) -> None:
    server.mistake = lambda text: text + "x" if '"seed":1' in text else text
    code, found = verified()
    assert code == 1
    assert 0 < len(found["sample_differences"]) < NUM
    assert found["manifest_differences"] == []
    assert "nothing in the manifests does" in found["conclusion"]


def test_another_grader_is_told_apart_from_another_engine(
    verified: Verified, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graders = tmp_path / "graders"
    graders.mkdir()
    for path in Path(integer.__file__).parent.glob("*.py"):
        (graders / path.name).write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr("deepinfer_evals.manifest.GRADERS", graders)
    code, found = verified()
    assert code == 1
    assert [one["path"] for one in found["manifest_differences"]] == ["grader.source"]
    assert found["sample_differences"] == []


def _certificate(path: Path, **change: Any) -> Path:
    body = {
        "kind": "deepinfer determinism certificate",
        "environment": {name: PROVENANCE[name] for name in ("versions", "machine", "settings", "patches")},
        "summary": {"is_passed": True},
        **change,
    }
    path.write_text(json.dumps({**body, "content_hash": hash_of(body)}), encoding="utf-8")
    return path


def test_a_healthy_server_passes_the_doctor(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(delay_s=0.1) as server:
        line = ("doctor", "--base-url", server.base_url)
        assert command(*line, "--certificate", _certificate(tmp_path / "c.json")) == 0
        text = capsys.readouterr().out
        assert "FAIL" not in text
        assert "same environment" in text
        assert server.most_in_flight > 4
        assert command(*line) == 0
        assert "none named" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "text"), [
    ({"summary": {"is_passed": False}}, "did not pass"),
    ({"environment": {**PROVENANCE, "settings": {}}}, "another environment: settings.batch_invariant"),
])  # fmt: skip
def test_a_certificate_of_something_else_fails(
    change: dict[str, Any], text: str, command: Command, server: FakeServer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = _certificate(tmp_path / "c.json", **change)
    assert command("doctor", "--base-url", server.base_url, "--certificate", path) == 1
    assert text in capsys.readouterr().out


def test_a_server_that_breaks_the_promise_fails_the_doctor(
    command: Command, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.mistake = lambda text: text + str(server.in_flight > 1)
    assert server.provenance is not None
    server.provenance["batch_invariant"] = False
    with FakeServer(delay_s=0.2) as slow:
        slow.mistake = lambda text: text + str(slow.most_in_flight > 1)
        assert command("doctor", "--base-url", slow.base_url) == 1
        assert "FAIL  the same among" in capsys.readouterr().out
        slow.mistake = lambda text: text.partition('"seed"')[0]
        assert command("doctor", "--base-url", slow.base_url) == 1
        assert "FAIL  seeds are used" in capsys.readouterr().out
    assert command("doctor", "--base-url", server.base_url) == 1
    assert "FAIL  batch-invariant mode" in capsys.readouterr().out
