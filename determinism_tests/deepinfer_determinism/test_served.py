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
from deepinfer_determinism.results import EQUAL, RunResult
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.witness import CLASS_PATH, witness_of

pytestmark = pytest.mark.slow

MODEL = "served"
FAULT = "deepinfer_plugin.engine_child.faults:window_short_after_the_first_request"
COPIES = 100
FLAGS = (
    f"--served-model-name={MODEL}",
    "--max-model-len=2048",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=268435456",
    f"--middleware={CLASS_PATH}",
)
START_S = 900.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deepinfer_plugin.reference.tiny import write_checkpoint

    folder = tmp_path_factory.mktemp("nano")
    write_checkpoint("nano", 0, folder)
    return folder


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


def test_the_served_model_shows_no_difference_and_bears_witness(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "certify.json"
    with serving(model, tmp_path / "server.log") as server:
        assert certified(server, out, "--copies", str(COPIES)) == 0
        _check_witness(server)
    run = RunResult.from_json(json.loads(out.read_text(encoding="utf-8"))["run"])
    outcomes = {result.relation: result.outcome for result in run.relations}
    assert {name for name, outcome in outcomes.items() if outcome != EQUAL} == {"restart"}
    copies = next(result for result in run.relations if result.relation == "copies")
    assert copies.mechanisms["distinct answers"] == 1


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


def test_a_served_fault_is_found(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model, tmp_path / "server.log", FAULT) as server:
        assert certified(server, tmp_path / "certify.json", "--only", "crowd") == 1
    assert "DIFFERENT: relation crowd" in capsys.readouterr().out
