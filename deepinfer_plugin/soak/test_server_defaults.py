"""A real server with the variables of F17-F19: every request follows them, and what each is free to say it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.cli.server import Server
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.soak.run import send
from deepinfer_plugin.soak.server import MODEL, soak_server
from deepinfer_plugin.soak.traffic import COMPLETIONS, Call

pytestmark = pytest.mark.slow

TOP = 3
BANNED = "10-80,90"
VARIABLES = {
    "DEEPINFER_SAMPLER_FORCE_TOPK": str(TOP),
    "DEEPINFER_DECODE_TOKEN_BLACKLIST": BANNED,
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": "1",
}
BODY: Mapping[str, Any] = {
    "prompt": "the sea is",
    "max_tokens": 12,
    "temperature": 2.0,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 1,
}


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFixture) -> Path:
    return checkpoint("nano", 0)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        envs.variables_set(VARIABLES),
        soak_server(folder, tmp_path_factory.mktemp("defaults") / "server.log") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def everything(folder: Path) -> int:
    """Size of the vocabulary."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]["vocab_size"])


def ask(server: Server, **changed: Any) -> Any:
    status, data = send(server.base_url, MODEL, Call(name="", path=COMPLETIONS, body={**BODY, **changed}))
    assert status == 200, data[:300]
    return json.loads(data)


def ids_of(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def test_a_plain_request_is_the_request_that_says_the_same(server: Server) -> None:
    plain = ask(server)
    said = ask(server, vllm_xargs={"force_top_k": TOP, "token_blacklist": BANNED, "sum_smaller_probs": 1})
    assert ids_of(plain) == ids_of(said)
    assert plain["choices"][0]["logprobs"] == said["choices"][0]["logprobs"]
    assert plain["sum_smaller_probs"] == said["sum_smaller_probs"]
    assert len(plain["sum_smaller_probs"][0]) == BODY["max_tokens"]
    assert not {*range(10, 81), 90}.intersection(ids_of(plain))


def test_the_whole_vocabulary_lifts_the_forced_top_k_and_one_is_greedy(server: Server, everything: int) -> None:
    free = ask(server, vllm_xargs={"force_top_k": everything})
    assert ids_of(free) != ids_of(ask(server)), "the default restricted nothing"
    greedy, one = ask(server, temperature=0.0), ask(server, vllm_xargs={"force_top_k": 1})
    assert ids_of(greedy) == ids_of(one)


def test_a_request_adds_to_the_banned_tokens_and_frees_none(server: Server) -> None:
    first = ids_of(ask(server, temperature=0.0))[0]
    answer = ids_of(ask(server, temperature=0.0, vllm_xargs={"token_blacklist": str(first)}))
    assert not {*range(10, 81), 90, first}.intersection(answer)
    body = {**BODY, "vllm_xargs": {"golden_token_ids": [90]}}
    status, data = send(server.base_url, MODEL, Call(name="", path=COMPLETIONS, body=body))
    assert status == 400
    assert b"with 90, which is in token_blacklist with that of the server" in data


def test_answers_that_cannot_carry_sums_and_those_that_decline_come_without(server: Server) -> None:
    assert "sum_smaller_probs" not in ask(server, vllm_xargs={"sum_smaller_probs": 0})
    both = ask(server, n=2)
    assert len(both["choices"]) == 2
    assert "sum_smaller_probs" not in both
    status, data = send(server.base_url, MODEL, Call(name="", path=COMPLETIONS, body={**BODY, "stream": True}))
    assert status == 200
    assert b"[DONE]" in data
    assert b"error" not in data
