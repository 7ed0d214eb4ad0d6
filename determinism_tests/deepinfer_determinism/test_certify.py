"""``certify`` against servers in this process: silent on a deterministic one, loud on every planted fault."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deepinfer_determinism import certify, client
from deepinfer_determinism.client import Answer, Ask, Endpoint, EndpointError, double_bits, double_of
from deepinfer_determinism.endpoint_relations import RELATIONS
from deepinfer_determinism.fake_server import MODEL, FakeServer, serving
from deepinfer_determinism.results import DIFFERENT, EQUAL, NOT_APPLICABLE, RunResult
from deepinfer_kernels.errors import DeepInferError


def arguments(base_url: str, out: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    certify.add_parser(parser.add_subparsers())
    line = ["certify", "--base-url", base_url, "--model", MODEL, "--out", str(out), "--copies", "60", *words]
    return parser.parse_args(line)


def outcomes(out: Path) -> dict[str, str]:
    run = RunResult.from_json(json.loads(out.read_text(encoding="utf-8"))["run"])
    return {result.relation: result.outcome for result in run.relations}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_deterministic_server_shows_no_difference(endpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "certify.json"
    with serving() as fake:
        assert certify.run(arguments(fake.base_url, out, "--endpoint", endpoint)) == 0
    expected = {name: NOT_APPLICABLE if name == "restart" else EQUAL for name in RELATIONS}
    assert outcomes(out) == expected
    value: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    copies = next(item for item in value["run"]["relations"] if item["relation"] == "copies")
    assert copies["mechanisms"]["copies"] == 60
    assert copies["mechanisms"]["distinct answers"] == 1
    assert copies["mechanisms"]["most at once"] > 30


@pytest.mark.parametrize(
    ("fault", "relation"),
    [
        ("crowd", "crowd"),
        ("stream", "streams"),
        ("asked", "logprobs_asked"),
        ("seed", "seeds"),
        ("shared noise", "samples"),
        ("leak", "canaries"),
        ("cut", "disconnect"),
        ("crowd", "copies"),
        ("crowd", "order"),
    ],
)
def test_a_planted_fault_is_found_by_its_relation(
    fault: str, relation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "certify.json"
    with serving(fault) as fake:
        assert certify.run(arguments(fake.base_url, out, "--only", "crowd", "--only", relation)) == 1
    assert outcomes(out)[relation] == DIFFERENT
    said = capsys.readouterr().out
    assert "DIFFERENT: relation " in said
    assert "\n  got  " in said
    assert "\n  want " in said


def test_one_bit_of_one_double_is_a_difference(tmp_path: Path) -> None:
    out = tmp_path / "certify.json"
    with serving("asked") as fake:
        assert certify.run(arguments(fake.base_url, out, "--only", "logprobs_asked")) == 1
    relation = json.loads(out.read_text(encoding="utf-8"))["run"]["relations"][-1]
    first = relation["first_difference"]
    assert first["got"] != first["want"]
    assert first["got"].split()[0] == first["want"].split()[0]  # the token is the same


def test_a_run_before_the_restart_is_compared(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    with serving() as fake:
        assert certify.run(arguments(fake.base_url, before, "--only", "repeat", "--seed", "3")) == 0
    with serving() as fake:
        assert certify.run(arguments(fake.base_url, after, "--only", "restart", "--compare", str(before))) == 0
        assert outcomes(after)["restart"] == EQUAL
    with serving("restart") as fake:
        assert certify.run(arguments(fake.base_url, after, "--only", "restart", "--compare", str(before))) == 1
        assert outcomes(after)["restart"] == DIFFERENT


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "certify.json"
    with serving("busy") as fake:
        assert certify.run(arguments(fake.base_url, out, "--only", "repeat")) == 0
    assert int(json.loads(out.read_text(encoding="utf-8"))["run"]["notes"]["requests sent again"]) > 0


def test_the_limit_of_requests_keeps_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "certify.json"
    with serving() as fake:
        assert certify.run(arguments(fake.base_url, out, "--requests-limit", "40")) == 0
        assert len(fake.bodies) <= 40
    assert "stopped early (certify: --requests-limit 40 is reached)" in capsys.readouterr().out
    value = json.loads(out.read_text(encoding="utf-8"))
    assert not value["run"]["is_complete"]
    assert len(value["run"]["relations"]) == 2


def test_a_server_that_fails_before_the_end_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "certify.json"
    with serving("fails") as fake:
        assert certify.run(arguments(fake.base_url, out)) == 2
    assert "answered 500: the engine is dead" in capsys.readouterr().out
    assert outcomes(out)["repeat"] == EQUAL


def test_an_idle_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may close it while the next request is on its way."""

    async def ask_twice(fake: FakeServer) -> None:
        async with Endpoint(fake.base_url, MODEL) as endpoint:
            for _ in range(2):
                await endpoint.complete(Ask(prompt="a", max_tokens=1))
                await endpoint.complete(Ask(prompt="a", max_tokens=1))
                await asyncio.sleep(0.3)

    monkeypatch.setattr(client, "KEEP_IDLE_S", 0.2)
    with serving() as fake:
        asyncio.run(ask_twice(fake))
        first, at_once, later, _ = fake.client_ports
        assert first == at_once != later


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "certify.json"
    with serving() as fake:
        command = [sys.executable, "-m", "deepinfer_determinism", "certify", "--base-url", fake.base_url]
        command += ["--model", MODEL, "--out", str(out), "--copies", "5000", "--concurrency", "4"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        seen = []
        for line in lines:
            seen.append(line)
            if line.startswith("disconnect"):  # what runs now are the copies
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert any("stopped early (interrupted); 9 relations are kept in" in line for line in seen), seen
    assert len(outcomes(out)) == 9


def test_an_unreachable_server_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"http://127.0.0.1:9 cannot be reached .*; check --base-url"):
        certify.run(arguments("http://127.0.0.1:9", tmp_path / "out.json"))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    def refused(message: str, fault: str = "", *words: str) -> None:
        with serving(fault) as fake, pytest.raises(DeepInferError, match=message):
            certify.run(arguments(fake.base_url, tmp_path / "out.json", *words))

    refused("--model is 'other', expected one that .* serves: fake", "", "--model", "other")
    refused("returned no log-probabilities for 'fake'", "no logprobs")
    refused("--copies is 1, expected at least 2", "", "--copies", "1")
    refused("--base-url is 'localhost', expected http", "", "--base-url", "localhost")
    refused("--out is .*, a folder", "", "--out", str(tmp_path))
    half = tmp_path / "half.json"
    half.write_text('{"kind": "certify", "for', encoding="utf-8")
    refused("--compare is .*half.json, which is no result of certify", "", "--compare", str(half))


def test_an_answer_keeps_its_bits_as_json() -> None:
    answer = Answer(
        text="a", tokens=("token_id:1",), logprobs=(-0.1,), top=((("token_id:2", -1e-300),),), finish_reason="stop"
    )
    assert Answer.from_json(json.loads(json.dumps(answer.to_json()))) == answer
    assert double_of(double_bits(-0.0)).hex() == "-0x0.0p+0"


def test_the_fake_server_counts_a_client_that_leaves() -> None:
    async def leave(fake: FakeServer) -> Answer:
        async with Endpoint(fake.base_url, MODEL) as endpoint:
            return await endpoint.stream(Ask(prompt="a", max_tokens=500), cut_after=2)

    with serving() as fake:
        answer = asyncio.run(leave(fake))
        assert answer.was_cut
        assert len(answer.tokens) == 2
        event = threading.Event()
        for _ in range(200):
            if fake.num_cut:
                break
            event.wait(0.02)
        assert fake.num_cut == 1
