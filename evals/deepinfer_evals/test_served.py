"""The evaluation against a real ``vllm serve`` on the nano checkpoint: schedules, a kill, and planted changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer_evals.__main__ import main
from deepinfer_evals.compare import comparison
from deepinfer_evals.run_folder import RunFolder
from deepinfer_evals.trials import FLAGS, START_S, killed_run, planted, two_schedules, verified, words
from deepinfer_plugin.cli.server import Server, free_port

pytestmark = pytest.mark.slow

QUESTIONS, EPOCHS = 8, 3
KILLS = 2
FAULT = "deepinfer_determinism.mutants_engine:decode_has_its_own_kernel"
KERNEL = "server.code.deepinfer_kernels.row_tiles.tiled_matmul"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano checkpoint."""
    from deepinfer_plugin.reference.tiny import write_checkpoint

    folder = tmp_path_factory.mktemp("nano")
    write_checkpoint("nano", 0, folder)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and runs of all tests here."""
    return tmp_path_factory.mktemp("work")


@contextmanager
def serving(model: Path, log: Path, fault: str = "") -> Iterator[Server]:
    server = Server(model, log, free_port(), FLAGS)
    if fault:
        code = f"from deepinfer_determinism.faulty_server import main; main({fault!r})"
        server.command = [sys.executable, "-c", code, *server.command[1:]]
    with server:
        server.wait_until_healthy(START_S)
        yield server


def test_the_served_model_repeats_a_run_to_the_bit(model: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model, work / "server.log") as server:
        _check_schedules(two_schedules(server.base_url, work, QUESTIONS, EPOCHS))
        named = planted(server.base_url, work, 3)
        assert named == {"nothing": True, "sampling parameter": True, "prompt byte": True}
        capsys.readouterr()
        assert main(["doctor", "--base-url", server.base_url]) == 0
        assert "functions of the engine process hashed" in capsys.readouterr().out
        _check_kills(server, work)


def _check_schedules(found: dict[str, Any]) -> None:
    assert found["identical_samples"] == found["shared_samples"] == QUESTIONS * EPOCHS
    assert found["verdicts_moved"] == 0
    assert found["manifest_differences"] == []


def _check_kills(server: Server, work: Path) -> None:
    kills, found = killed_run(server, work, QUESTIONS, EPOCHS, KILLS, seed=2)  # whose moments are both while it asks
    assert (kills.lost, kills.repeated, kills.finished) == (0, 0, QUESTIONS * EPOCHS)
    assert kills.while_asking >= 1
    assert found["identical_samples"] == QUESTIONS * EPOCHS


def test_a_changed_kernel_is_found_and_named(model: Path, work: Path) -> None:
    """Needs the run of the test before; its scores are neither all right nor all wrong."""
    report = json.loads((work / "whole" / "report.json").read_text(encoding="utf-8"))
    assert 0.0 < report["score"]["mean"] < 1.0
    with serving(model, work / "faulty.log", FAULT) as server:
        code, found = verified(server.base_url, work / "whole", work / "faulty.json")
    assert code == 1
    assert KERNEL in [one["path"] for one in found["manifest_differences"]]
    assert {one["cause"] for one in found["manifest_differences"]} == {"engine"}  # answers differ by who decodes beside


def test_a_server_of_our_own_gives_the_same_answers_and_ends(model: Path, work: Path) -> None:
    """Needs the run of the first test."""
    out = work / "own"
    line = words("", work / "rows", out, "--epochs", 1, "--limit", 2, "--model-name", "served")
    at = line.index("--base-url")
    flags = [flag for flag in FLAGS if "name" not in flag and "parser" not in flag]
    assert main([*line[:at], "--model", str(model), *line[at + 2 :], "--", *flags]) == 0
    found = comparison(RunFolder(work / "whole"), RunFolder(out))
    assert found["identical_samples"] == found["shared_samples"] == 2
    assert found["manifest_differences"] == []
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{RunFolder(out).manifest().recorded['base_url']}/health", timeout=5)
