"""Witnesses, through the middleware around a small ASGI application."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_plugin import answer_provenance, witness
from deepinfer_plugin.speculative.facts import FACTS_OF_RESPONSE
from deepinfer_plugin.witness import WitnessMiddleware, witness_of

PROMPT, OUTPUT, LOGPROBS = [5, 6, 70000], [9, 2], [-0.1, -1e-300]
ASK = {"vllm_xargs": {"witness": 1}}


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers to a completion request."""
    choice: dict[str, Any] = {"index": 0, "text": "a b", "finish_reason": "length", "logprobs": None}
    if body.get("return_token_ids"):
        choice |= {"token_ids": OUTPUT, "prompt_token_ids": PROMPT}
    if body.get("logprobs") is not None:
        choice["logprobs"] = {"tokens": ["a", "b"], "token_logprobs": LOGPROBS}
    return {"id": "x", "choices": [choice]}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "message": {"content": "a b"}, "finish_reason": "length", "logprobs": None}
    value: dict[str, Any] = {"id": "x", "choices": [choice]}
    if body.get("return_token_ids"):
        choice["token_ids"], value["prompt_token_ids"] = OUTPUT, PROMPT
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "t", "logprob": number} for number in LOGPROBS]}
    return value


def chunks(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same completion as a stream of two tokens."""
    found = []
    for index, (token, score) in enumerate(zip(OUTPUT, LOGPROBS, strict=True)):
        choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": "length" if index else None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": [token]} | ({} if index else {"prompt_token_ids": PROMPT})
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": ["a"], "token_logprobs": [score]}
        found.append({"id": "x", "choices": [choice]})
    return found


class App:
    """Answers JSON, or a stream in pieces that do not end where its events end."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any] = completion, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.body: dict[str, Any] = {}
        self.raw = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.raw = (await receive())["body"]
        headers = {bytes(name): bytes(value) for name, value in scope["headers"]}
        assert int(headers[b"content-length"]) == len(self.raw)
        self.body = json.loads(self.raw) if self.raw.startswith(b"{") else {}
        is_stream = bool(self.body.get("stream"))
        kind = b"text/event-stream" if is_stream else b"application/json"
        answer = self.answer(self.body)
        text = json.dumps(answer).encode()
        if is_stream:
            text = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in answer) + b"data: [DONE]\n\n"
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]})
        for start in range(0, len(text), 37):
            await send({"type": "http.response.body", "body": text[start : start + 37], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def post(app: App, body: Any, path: str = "/v1/completions") -> tuple[int, bytes]:
    """One request through the middleware: status and body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", str(len(raw)).encode())]}
    asyncio.run(WitnessMiddleware(app)(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent[1:])
    lengths = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths in ([], [len(text)])
    return int(sent[0]["status"]), text


def test_the_hashes_are_those_of_the_documented_bytes() -> None:
    found = witness_of(PROMPT, OUTPUT, LOGPROBS)
    prompt = hashlib.sha256(struct.pack("<3I", *PROMPT))
    output = hashlib.sha256(bytes([9, 0, 0, 0, 2, 0, 0, 0]))
    scores = hashlib.sha256(struct.pack("<2d", *LOGPROBS))
    whole = hashlib.sha256(b"deepinfer-witness-1\0" + prompt.digest() + output.digest() + scores.digest())
    assert found == {
        "prompt": prompt.hexdigest(),
        "output": output.hexdigest(),
        "logprobs": scores.hexdigest(),
        "all": whole.hexdigest(),
    }
    with pytest.raises(ValueError, match="2 output ids came with 1 log-probabilities, expected one each"):
        witness_of(PROMPT, OUTPUT, LOGPROBS[:1])


@pytest.mark.parametrize(
    ("answer", "path"), [(completion, "/v1/completions"), (chat, "/v1/chat/completions")], ids=["completion", "chat"]
)
def test_a_witness_comes_on_request_and_nothing_else_changes(answer: Callable[..., Any], path: str) -> None:
    app = App(answer)
    status, text = post(app, {"temperature": 0, **ASK}, path)
    assert status == 200
    value = json.loads(text)
    assert value["choices"][0].pop("witness") == witness_of(PROMPT, OUTPUT, LOGPROBS)
    assert value == answer({})  # ids and log-probabilities, which nobody asked for, are gone again
    assert app.body["return_token_ids"] is True
    assert "witness" not in (app.body["vllm_xargs"] or {})


def test_what_was_asked_for_stays() -> None:
    body = {"temperature": 0, "logprobs": 3, "return_token_ids": True, "vllm_xargs": {"witness": 1, "other": 2}}
    app = App()
    value = json.loads(post(app, body)[1])
    assert value["choices"][0]["token_ids"] == OUTPUT
    assert value["choices"][0]["logprobs"]["token_logprobs"] == LOGPROBS
    assert app.body["logprobs"] == 3
    assert app.body["vllm_xargs"] == {"other": 2}


def test_a_stream_carries_the_witness_on_its_last_chunk() -> None:
    _, text = post(App(chunks), {"temperature": 0, "stream": True, **ASK})
    *events, done, end = text.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    first, last = (json.loads(event.removeprefix(b"data: ")) for event in events)
    assert "witness" not in first["choices"][0]
    assert last["choices"][0]["witness"] == witness_of(PROMPT, OUTPUT, LOGPROBS)
    assert "token_ids" not in first["choices"][0]


@pytest.mark.parametrize("body", [{"temperature": 0.5}, {"vllm_xargs": {"seq_seed": 3}}, {"vllm_xargs": None}])
def test_a_request_without_the_word_keeps_its_bytes(body: dict[str, Any]) -> None:
    app = App()
    assert json.loads(post(app, body)[1]) == completion({})
    assert app.raw == json.dumps(body).encode()


@pytest.mark.parametrize("word", [0, "0", "false", ""])
def test_a_witness_can_be_declined(word: object) -> None:
    app = App()
    assert json.loads(post(app, {"vllm_xargs": {"witness": word}})[1]) == completion({})
    assert app.body == {"vllm_xargs": None}


def test_errors_and_bodies_that_are_no_json_are_passed_on() -> None:
    app = App(status=400)
    status, text = post(app, {"temperature": 1, **ASK})
    assert status == 400
    assert "witness" not in json.loads(text)["choices"][0]
    assert post(App(), b"no json")[0] == 200


def test_a_witness_is_refused_where_there_is_none() -> None:
    status, text = post(App(), {"temperature": 0, **ASK}, "/v1/responses")
    assert status == 400
    assert "/v1/responses does not carry one" in json.loads(text)["error"]["message"]


def test_a_server_without_token_ids_gives_an_error_instead_of_a_hash() -> None:
    app = App(lambda body: completion({}))
    value = json.loads(post(app, {"temperature": 0, **ASK})[1])
    assert value["choices"][0]["witness"]["error"].startswith("witness: the answer came without token ids")


def test_it_becomes_a_default_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=[])
    witness.add_to_server(parser)
    witness.add_to_server(parser)
    witness.add_to_server(None)
    assert parser.parse_args([]).middleware == [witness.CLASS_PATH]
    assert parser.parse_args(["--middleware", "a.b"]).middleware == [witness.CLASS_PATH, "a.b"]


STEPS = [{"drafted": 2, "verified": 1, "accepted": 1, "confidence_score": [0.5, 0.25]}]


def noting(answer: Callable[[dict[str, Any]], Any], names: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    """What the front end does while it answers: it fills the facts of each prompt, here in another order."""

    def answer_and_note(body: dict[str, Any]) -> Any:
        of_response = FACTS_OF_RESPONSE.get()
        assert of_response is not None
        for number, name in sorted(enumerate(names), reverse=True):
            of_response[name] = STEPS * number
        return answer(body)

    return answer_and_note


def test_facts_of_drafts_come_with_the_choice_of_their_prompt() -> None:
    choices = [{"index": i, "text": "a", "finish_reason": "stop"} for i in range(12)]
    names = tuple(f"cmpl-x-{i}" for i in range(12))
    app = App(noting(lambda body: {"choices": choices}, names))
    value = json.loads(post(app, {"prompt": ["a"] * 12, "vllm_xargs": {"draft_facts": True}})[1])
    assert [choice["draft_facts"] for choice in value["choices"]] == [STEPS * i for i in range(12)]
    assert app.body["vllm_xargs"] == {"draft_facts": True}, "the engine reads it too"
    assert FACTS_OF_RESPONSE.get() is None


def test_a_stream_carries_facts_on_its_last_chunk() -> None:
    app = App(noting(chunks, ("chatcmpl-x",)))
    _, text = post(app, {"stream": True, "vllm_xargs": {"draft_facts": 1}}, "/v1/chat/completions")
    first, last = (json.loads(event.removeprefix(b"data: ")) for event in text.split(b"\n\n")[:2])
    assert "draft_facts" not in first["choices"][0]
    assert last["choices"][0]["draft_facts"] == []


def test_facts_of_another_model_are_an_error_in_their_place() -> None:
    value = json.loads(post(App(), {"vllm_xargs": {"draft_facts": True}})[1])
    assert "model that serves is not the plugin's" in value["choices"][0]["draft_facts"]["error"]
    status, text = post(App(), {"vllm_xargs": {"draft_facts": True}}, "/v1/responses")
    assert status == 400
    assert b"draft_facts: /v1/responses does not carry one" in text


FACTS = {"certificate": None, "kernel_set": "reference", "settings_hash": "ab"}


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_provenance._NOTED, "facts", FACTS)


@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize(
    ("answer", "path"), [(completion, "/v1/completions"), (chat, "/v1/chat/completions")], ids=["completion", "chat"]
)
def test_provenance_comes_on_request_and_nothing_else_changes(answer: Callable[..., Any], path: str) -> None:
    app = App(lambda body: {"seed": 9, **answer(body)})
    value = json.loads(post(app, {"temperature": 1, "vllm_xargs": {"provenance": True, "other": 2}}, path)[1])
    assert value["choices"][0].pop("provenance") == {"seed": 9, **FACTS}
    assert value == {"seed": 9, **answer({})}
    assert app.body == {"temperature": 1, "vllm_xargs": {"other": 2}}


@pytest.mark.usefixtures("facts")
def test_a_stream_carries_provenance_with_the_seed_of_its_first_event() -> None:
    app = App(lambda body: [{**chunk, **({} if i else {"seed": 4})} for i, chunk in enumerate(chunks(body))])
    _, text = post(app, {"stream": True, "vllm_xargs": {"provenance": True, "witness": 1}})
    first, last = (json.loads(event.removeprefix(b"data: ")) for event in text.split(b"\n\n")[:2])
    assert "provenance" not in first["choices"][0]
    assert last["choices"][0]["provenance"] == {"seed": 4, **FACTS}
    assert last["choices"][0]["witness"] == witness_of(PROMPT, OUTPUT, LOGPROBS)


@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({}, [None, None, None, None]),  # greedy: nothing was drawn
        ({"seed": 5}, [5, 6, 5, 6]),
        ({"seeds": [5, -1 << 63]}, [5, 6, -1 << 63, (-1 << 63) + 1]),
        ({"seed": (1 << 63) - 1}, [(1 << 63) - 1, -1 << 63, (1 << 63) - 1, -1 << 63]),
    ],
)
def test_each_sample_names_the_seed_that_repeats_it(field: dict[str, Any], expected: list[int | None]) -> None:
    choices = [{"index": i, "text": "a", "finish_reason": "stop"} for i in range(4)]  # 2 prompts, 2 samples each
    app = App(lambda body: {**field, "choices": choices})
    value = json.loads(post(app, {"n": 2, "prompt": ["a", "b"], "vllm_xargs": {"provenance": 1}})[1])
    assert [choice["provenance"]["seed"] for choice in value["choices"]] == expected


def test_provenance_of_another_model_is_an_error_in_its_place() -> None:
    answer_provenance.forget()
    value = json.loads(post(App(), {"vllm_xargs": {"provenance": True}})[1])
    assert "model that serves is not the plugin's" in value["choices"][0]["provenance"]["error"]
