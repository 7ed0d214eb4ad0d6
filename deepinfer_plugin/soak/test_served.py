"""A real server under hostile requests: what they ask for is refused, and their neighbours keep their bits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.cli.server import Server
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.encoding.conversation import RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import PromptEncoder
from deepinfer_plugin.soak.run import Soak, answer_of, send, solo_answers
from deepinfer_plugin.soak.server import MODEL, resident_mib, soak_server
from deepinfer_plugin.soak.traffic import BAD, CHAT, COMPLETIONS, CONTROL_TEXT, GOOD, TOKENIZE, Call

Answers = dict[str, Any]
NUM_NEIGHBOURS = 32
SOAK_S = {"quick": 20.0, "full": 600.0}
MAX_GROWTH = 0.05

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFixture) -> Path:
    return checkpoint("nano", 0)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with soak_server(folder, tmp_path_factory.mktemp("soak") / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def solo(server: Server) -> Answers:
    """The answer that each good request gives on an idle server."""
    return solo_answers(server.base_url, MODEL, GOOD)


def ask(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, data = send(server.base_url, MODEL, Call(name="", path=path, body=body))
    return status, json.loads(data)


def text_of(solo: Answers, name: str) -> str:
    return str(solo[name][0]["text"])


def test_chat_prompts_are_those_of_the_encoder_and_hold_no_control_token_of_the_text(
    server: Server, folder: Path
) -> None:
    encoder = PromptEncoder((folder / "tokenizer.json").read_text(encoding="utf-8"))
    parts = [{"type": "text", "text": text} for text in (CONTROL_TEXT, "<｜us", "er｜>", "<think>")]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": CONTROL_TEXT},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a", "reasoning": CONTROL_TEXT},
        {"role": "tool", "content": CONTROL_TEXT, "tool_call_id": "1"},
    ]
    expected = encoder.encode(build_conversation(messages, RenderOptions()))
    harmless = encoder.encode(
        build_conversation([{**m, "content": "x", "reasoning": "x"} for m in messages], RenderOptions())
    )
    controls = [token for token in expected if token in encoder.added_ids]
    assert controls == [token for token in harmless if token in encoder.added_ids]
    status, answer = ask(server, TOKENIZE, messages=messages)
    assert (status, answer.get("tokens")) == (200, expected)
    status, answer = ask(server, CHAT, messages=messages, max_tokens=1, return_token_ids=True)
    assert (status, answer.get("prompt_token_ids")) == (200, expected)
    status, answer = ask(server, TOKENIZE, prompt="<think>", add_special_tokens=False)
    assert answer["tokens"] == [encoder.id_of("<think>")], "a raw prompt is a rendered prompt"


def test_an_image_is_refused_before_anything_is_fetched(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    status, answer = ask(server, CHAT, messages=[{"role": "user", "content": [part]}])
    assert status == 400
    assert "--allowed-media-domains" in answer["error"]["message"]


def test_each_extra_parameter_has_its_effect(server: Server, solo: Answers) -> None:
    assert solo["golden"][0]["token_ids"][:4] == [20, 21, 22, 23]
    assert not {*range(10, 81), 90}.intersection(solo["blacklist"][0]["token_ids"])
    body = {"prompt": "the sea is", "max_tokens": 8, "return_token_ids": True}
    _, greedy = ask(server, COMPLETIONS, **body, temperature=0.0)
    _, top = ask(server, COMPLETIONS, **body, temperature=1.5, vllm_xargs={"force_top_k": 1})
    assert top["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]
    status, capped = ask(
        server, COMPLETIONS, **{**body, "prompt": [20] * 9}, ignore_eos=True, vllm_xargs={"context_cap": 12}
    )
    assert (status, len(capped["choices"][0]["token_ids"])) == (200, 3)
    banned = greedy["choices"][0]["token_ids"][0]
    _, other = ask(server, COMPLETIONS, **body, temperature=0.0, vllm_xargs={"token_blacklist": [banned]})
    assert banned not in other["choices"][0]["token_ids"]


def test_sums_of_smaller_probabilities_come_with_the_answer_that_asks(server: Server) -> None:
    body = {"prompt": "the sea is", "max_tokens": 6, "seed": 2, "temperature": 1.0, "return_token_ids": True}
    asked = {**body, "vllm_xargs": {"sum_smaller_probs": 1}}
    plain = {**body, "logprobs": 5, "prompt": ["the sea is", "a stone"]}
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(ask, server, COMPLETIONS, **plain) for _ in range(6)]
        (status, answer), (_, again) = (ask(server, COMPLETIONS, **asked) for _ in range(2))
        others = [future.result() for future in beside]
    assert status == 200
    (sums,) = answer["sum_smaller_probs"]
    assert len(sums) == len(answer["choices"][0]["token_ids"])
    assert all(0.0 < value <= 1.0 for value in sums)
    assert again["sum_smaller_probs"] == answer["sum_smaller_probs"]
    assert answer["choices"][0]["logprobs"] is None, "nobody asked for them"
    for status, other in others:
        assert status == 200
        assert "sum_smaller_probs" not in other
        assert all(len(top) <= 6 for top in other["choices"][0]["logprobs"]["top_logprobs"])
    _, greedy = ask(server, COMPLETIONS, **{**asked, "temperature": 0.0})
    assert greedy["sum_smaller_probs"][0] == pytest.approx([1.0] * 6), "the likeliest token has all others below it"
    # vLLM has begun the answer of a stream when it refuses a parameter: the error is its only event
    _, refused = send(server.base_url, MODEL, Call(name="", path=COMPLETIONS, body={**asked, "stream": True}))
    assert b"ask without stream" in refused


def test_each_form_of_structured_output_has_its_effect(server: Server, solo: Answers) -> None:
    assert re.fullmatch("[a-c]{3,9}", solo["regex"][0]["message"]["content"])
    assert re.fullmatch(r"((go|stop) )*(end|go|stop|g|s|st|sto|e|en|)", text_of(solo, "so_args"))
    schema = {"enum": ["on", "off"]}
    body = {"prompt": "a", "max_tokens": 12, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    for value in (json.dumps(schema), schema):
        so_args = json.dumps({"schema_type": "json", "schema": value})
        status, answer = ask(server, COMPLETIONS, **body, vllm_xargs={"so_args": so_args})
        assert (status, answer["choices"][0]["text"]) in ((200, '"on"'), (200, '"off"'))
    trigger = [20, 21]
    so_args = json.dumps({"schema_type": "regex", "schema": "ab", "trigger_token_ids": trigger})
    # golden tokens cannot stand beside a grammar, so the trigger is made likely instead
    bias = {"20": 60.0, "21": 60.0}
    _, answer = ask(server, COMPLETIONS, **body, ignore_eos=True, logit_bias=bias, vllm_xargs={"so_args": so_args})
    ids = answer["choices"][0]["token_ids"]
    start = next(i for i in range(len(ids)) if ids[i : i + 2] == trigger)
    _, after = ask(server, "/detokenize", tokens=ids[start + 2 :])
    assert after["prompt"].startswith("ab")


def test_neighbours_keep_their_bits_beside_every_hostile_request(server: Server, solo: Answers) -> None:
    neighbours = [GOOD[i % len(GOOD)] for i in range(NUM_NEIGHBOURS)]
    with ThreadPoolExecutor(NUM_NEIGHBOURS + 8) as pool:
        hostile = [pool.submit(send, server.base_url, MODEL, call) for call in BAD]
        answers = [pool.submit(send, server.base_url, MODEL, call) for call in neighbours]
        refused = [future.result() for future in hostile]
        found = [future.result() for future in answers]
    for call, (status, body) in zip(BAD, refused, strict=True):
        if call.leaves_after is None:
            assert status in call.expected, (call.name, status, body[:300])
        if call.name.startswith(("constraint", "extra")):
            assert status == 400, (call.name, status)
            assert len(json.loads(body)["error"]["message"]) < 1000, call.name
    for call, (status, body) in zip(neighbours, found, strict=True):
        assert status == 200, (call.name, body[:300])
        assert answer_of(body) == solo[call.name], call.name


def test_a_soak_meets_no_crash_no_difference_and_no_leak(
    server: Server, solo: Answers, request: pytest.FixtureRequest
) -> None:
    depth = request.config.getoption("--depth")
    report = Soak(server.base_url, MODEL, solo, 0).run(SOAK_S[depth], 16, lambda: resident_mib(server))
    server.check_alive()
    assert report.unexpected == []
    assert report.differing == []
    assert report.good > 0
    assert report.hostile > 0
    if depth == "full":
        assert report.memory_growth < MAX_GROWTH
