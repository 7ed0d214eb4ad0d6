"""A server on the nano checkpoint, with drafts: answers carry their facts, /metrics our series, the log our lines."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.answer_provenance import weights_identity
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.metrics import BALANCE_METRICS, METRICS, WORKER_METRICS
from deepinfer_plugin.replay.series import SERIES
from deepinfer_plugin.speculative import series as draft_series

MODEL = "nano"
FLAGS = (
    f"--served-model-name={MODEL}",
    "--max-model-len=512",
    "--max-num-seqs=4",
    "--kv-cache-memory-bytes=67108864",
)
NUM_DRAFTS = 2
HEALTH_S = 600
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def nano(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nano", 0)


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("CUDA_VISIBLE_DEVICES", ""),
            ("OMP_NUM_THREADS", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DEEPINFER_LOGGING_INTERVAL_STEP", "5"),
            ("DEEPINFER_USE_NEXTN_DECODE", str(NUM_DRAFTS)),
        ):
            patch.setenv(name, value)
        patch.delenv("DEEPINFER_METRICS_DIR", raising=False)
        started = Server(nano, tmp_path_factory.mktemp("served") / "server.log", free_port(), FLAGS)
        with started:
            started.wait_until_healthy(HEALTH_S)
            yield started


def post(server: Server, path: str, **body: Any) -> bytes:
    data = json.dumps({"model": MODEL, "max_tokens": 8, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{server.base_url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def test_completion_chat_and_stream_carry_the_same_facts(server: Server, nano: Path) -> None:
    ask = {"vllm_xargs": {"provenance": True}, "temperature": 1.0, "seed": 3}
    completion = json.loads(post(server, "/v1/completions", prompt=PROMPT, n=2, **ask))
    first, second = (choice.pop("provenance") for choice in completion["choices"])
    assert (first.pop("seed"), second.pop("seed")) == (3, 4)
    assert first == second
    assert first["weights"] == weights_identity(nano)
    assert (first["kernel_set"], first["arithmetic"], first["certificate"]) == ("reference", "ref", None)
    assert first["replay"] == {"decoder": "compact:140", "encoder": "exact"}
    messages = [{"role": "user", "content": PROMPT}]
    chat = json.loads(post(server, "/v1/chat/completions", messages=messages, **ask))
    assert chat["choices"][0]["provenance"] == {"seed": 3, **first}
    stream = post(server, "/v1/chat/completions", messages=messages, stream=True, **ask)
    events = [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    carried = [choice["provenance"] for event in events for choice in event["choices"] if "provenance" in choice]
    assert carried == [{"seed": 3, **first}]


def test_facts_of_drafts_come_to_those_who_ask(server: Server) -> None:
    ask = {"vllm_xargs": {"draft_facts": True}, "return_token_ids": True}
    prompts = {"prompt": [PROMPT, "a stone"], "max_tokens": 12, "seed": 5}
    answer = json.loads(post(server, "/v1/completions", **prompts, **ask))
    plain = json.loads(post(server, "/v1/completions", **prompts, return_token_ids=True))
    for choice, other in zip(answer["choices"], plain["choices"], strict=True):
        first, *steps = choice.pop("draft_facts")
        assert first == {"drafted": 0, "verified": 0, "accepted": 0, "confidence_score": []}
        assert {(step["drafted"], step["verified"]) for step in steps} <= {(1, 1), (2, 2)}
        assert all(len(step["confidence_score"]) == step["drafted"] for step in steps)
        assert all(0.0 < value < 1.0 for step in steps for value in step["confidence_score"])
        assert sum(step["accepted"] + 1 for step in (first, *steps)) >= 12
        assert choice == other  # log-probabilities, with which facts travel, were not asked for
    messages = [{"role": "user", "content": PROMPT}]
    chat = json.loads(post(server, "/v1/chat/completions", messages=messages, seed=5, **ask))["choices"][0]
    stream = post(server, "/v1/chat/completions", messages=messages, seed=5, stream=True, **ask)
    events = [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    carried = [choice["draft_facts"] for event in events for choice in event["choices"] if "draft_facts" in choice]
    assert carried == [chat["draft_facts"]]
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        post(server, "/v1/completions", prompt=PROMPT, n=2, **ask)
    assert b"draft_facts is set with n 2, expected n 1" in caught.value.read()


def test_an_answer_that_names_its_seed_can_be_repeated(server: Server) -> None:
    ask = {"vllm_xargs": {"provenance": True}, "temperature": 1.0, "prompt": PROMPT}
    drawn = json.loads(post(server, "/v1/completions", **ask))["choices"][0]
    again = json.loads(post(server, "/v1/completions", **ask, seed=drawn["provenance"]["seed"]))["choices"][0]
    assert again["text"] == drawn["text"]
    greedy = json.loads(post(server, "/v1/completions", **{**ask, "temperature": 0}))["choices"][0]
    assert greedy["provenance"]["seed"] is None


def test_the_series_stand_on_vllms_own_endpoint(server: Server) -> None:
    post(server, "/v1/completions", prompt=PROMPT, max_tokens=40)
    time.sleep(1.1)  # the engine's process publishes once a second
    post(server, "/v1/completions", prompt=PROMPT, max_tokens=20)
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    value = {name: float(number) for name, number in re.findall(r"^(deepinfer_\w+)(?:\{.*\})? (\S+)$", text, re.M)}
    every = (*METRICS, *WORKER_METRICS, *BALANCE_METRICS, *SERIES, *draft_series.SERIES)
    seen = {metric.name for metric in every}
    # 128 steps with tokens make the first figure of balance; there may be fewer here
    assert seen - set(value) <= {"deepinfer_moe_lb_ratio"}
    assert value["deepinfer_steps_total"] >= 50
    assert value["deepinfer_forward_rows_total"] >= 40
    assert value["deepinfer_replay_decoder_rows_total"] >= 40
    assert value["deepinfer_generation_tokens_per_second"] > 0
    verified, accepted = (_by_position(text, f"deepinfer_drafts_{kind}_total") for kind in ("verified", "accepted"))
    assert len(verified) == NUM_DRAFTS
    assert all(0 <= accepted[place] <= verified[place] > 40 for place in verified)
    [info] = [line for line in text.splitlines() if line.startswith("deepinfer_info{")]
    assert 'kernel_set="reference"' in info
    assert "vllm:num_requests_running" in text


def _by_position(text: str, name: str) -> dict[str, float]:
    found = re.findall(rf'^{name}{{engine="0",position="(\d)"}} (\S+)$', text, re.M)
    return {place: float(number) for place, number in found}


def test_the_log_holds_a_line_per_interval(server: Server) -> None:
    post(server, "/v1/completions", prompt=PROMPT, max_tokens=20)
    lines = re.findall(r"DeepInfer engine 0: (\d+) steps, running \d+, .*tokens_per_second", server.log.read_text())
    assert len(lines) >= 4
    assert set(lines) == {"5"}
