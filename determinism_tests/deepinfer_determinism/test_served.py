"""``certify`` and the witness against a real ``vllm serve`` on the nano checkpoint, with and without a fault."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer_determinism import certify
from deepinfer_determinism.__main__ import main
from deepinfer_determinism.results import DIFFERENT, EQUAL, RelationResult, RunResult
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.witness import CLASS_PATH, witness_of

pytestmark = pytest.mark.slow

MODEL = "served"
FAULT = "deepinfer_plugin.engine_child.faults:window_short_after_the_first_request"
COPIES = 64
FLAGS = (
    f"--served-model-name={MODEL}",
    "--max-model-len=512",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=268435456",
    f"--middleware={CLASS_PATH}",
)
START_S = 900.0
ONE_SERVER = "--depth full starts this server too; the quick set plants its fault in test_certify.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


def checkpoint(folder: Path, seed: int) -> Path:
    from deepinfer_plugin.reference.tiny import write_checkpoint

    model = folder / f"nano-s{seed}"
    if not model.exists():
        write_checkpoint("nano", seed, model)
    return model


@contextmanager
def serving(model: Path, log: Path, fault: str = "") -> Iterator[Server]:
    server = Server(model, log, free_port(), FLAGS)
    if fault:
        code = f"from deepinfer_determinism.faulty_server import main; main({fault!r})"
        server.command = [sys.executable, "-c", code, *server.command[1:]]
    with server:
        server.wait_until_healthy(START_S)
        yield server


def certified(server: Server, out: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    certify.add_parser(parser.add_subparsers())
    line = ["certify", "--base-url", server.base_url, "--model", MODEL, "--out", str(out), *words]
    parsed = parser.parse_args(line)
    return int(parsed.run(parsed))


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.base_url}{path}", json={"model": MODEL, "max_tokens": 6, **body}, timeout=300)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def outcomes(out: Path) -> dict[str, RelationResult]:
    run = RunResult.from_json(json.loads(out.read_text(encoding="utf-8"))["run"])
    return {result.relation: result for result in run.relations}


def test_the_served_model_shows_no_difference_and_bears_witness(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folder / "before.json"
    with serving(checkpoint(folder, 0), tmp_path / "server.log") as server:
        assert certified(server, before, "--copies", str(COPIES)) == 0
        _check_witness(server)
        _check_bad_requests_to_certify(server, tmp_path, capsys)
    found = outcomes(before)
    assert {name for name, result in found.items() if result.outcome != EQUAL} == {"restart"}
    assert found["copies"].mechanisms["distinct answers"] == 1


def test_a_restart_changes_nothing_and_a_served_fault_is_found(
    folder: Path, tmp_path: Path, depth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault of the second server changes requests beside others only: alone they are as before the restart."""
    if depth != "full":
        pytest.skip(ONE_SERVER)
    before, out = folder / "before.json", tmp_path / "certify.json"
    assert before.exists(), "the test above writes it"
    with serving(checkpoint(folder, 0), tmp_path / "server.log", FAULT) as server:
        assert certified(server, out, "--only", "restart", "--compare", str(before)) == 0
        assert outcomes(out)["restart"].outcome == EQUAL
        assert outcomes(out)["restart"].rows_compared > 100
        assert certified(server, out, "--only", "crowd") == 1
    assert "DIFFERENT: relation crowd" in capsys.readouterr().out


def _check_witness(server: Server) -> None:
    """Same hashes as from what the response holds; the drawn seed repeats the answer."""
    ask = {"prompt": "a river", "vllm_xargs": {"witness": 1}, "temperature": 1.0}
    first = post(server, "/v1/completions", ask)
    seed = first["seed"]
    open_hand = {"return_token_ids": True, "logprobs": 0, "seed": seed}
    again = post(server, "/v1/completions", {**ask, **open_hand})
    choice = again["choices"][0]
    expected = witness_of(choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
    assert first["choices"][0]["witness"] == choice["witness"] == expected
    assert "token_ids" not in first["choices"][0]
    messages = [{"role": "user", "content": "a river"}]
    chat = {"messages": messages, "vllm_xargs": {"witness": 1}, "temperature": 1.0, "seed": 3}
    whole = post(server, "/v1/chat/completions", chat)["choices"][0]["witness"]
    assert set(whole) == {"prompt", "output", "logprobs", "all"}
    url = f"{server.base_url}/v1/chat/completions"
    with httpx.stream(
        "POST", url, json={"model": MODEL, "max_tokens": 6, "stream": True, **chat}, timeout=300
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert [choice["witness"] for choice in choices if "witness" in choice] == [whole]


def _check_bad_requests_to_certify(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that this server does not know is one clear line; nothing is written."""
    capsys.readouterr()
    out = tmp_path / "bad.json"
    assert main(["certify", "--base-url", server.base_url, "--model", "other", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: certify: --model is 'other', expected one that ")
    assert said.count("\n") == 1
    assert not out.exists()


def test_other_weights_behind_a_restart_are_found(
    folder: Path, tmp_path: Path, depth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if depth != "full":
        pytest.skip(ONE_SERVER)
    before, out = folder / "before.json", tmp_path / "certify.json"
    with serving(checkpoint(folder, 1), tmp_path / "server.log") as server:
        assert certified(server, out, "--only", "restart", "--compare", str(before)) == 1
    assert outcomes(out)["restart"].outcome == DIFFERENT
    assert "DIFFERENT: relation restart" in capsys.readouterr().out
