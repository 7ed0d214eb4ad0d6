"""The field is added where a seed was noted, and every other byte of every answer stays."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import pytest

from deepinfer_plugin.sampling.front_end import SEEDS_OF_RESPONSE
from deepinfer_plugin.sampling.seed_middleware import CLASS_PATH, SeedMiddleware, add_to_server

JSON, STREAM = b"application/json", b"text/event-stream; charset=utf-8"


def answer(
    pieces: list[bytes],
    seeds: dict[str, int],
    kind: bytes = JSON,
    status: int = 200,
    method: str = "POST",
    has_length: bool = True,
) -> tuple[dict[bytes, bytes], list[bytes], int]:
    """Send the pieces through the middleware: headers, bodies as they arrived, number of start messages."""
    arrived: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        noted = SEEDS_OF_RESPONSE.get()
        if noted is not None:
            noted.update(seeds)
        headers = [(b"Content-Type", kind), (b"x-other", b"1")]
        if has_length:
            headers.append((b"content-length", str(sum(map(len, pieces))).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for index, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": index + 1 < len(pieces)})

    async def send(message: Any) -> None:
        arrived.append(dict(message))

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope: dict[str, Any] = {"type": "http", "method": method}
    asyncio.run(SeedMiddleware(app)(scope, receive, send))
    starts = [message for message in arrived if message["type"] == "http.response.start"]
    assert arrived[0] is starts[0], "the start came first"
    bodies = [message["body"] for message in arrived if message["type"] == "http.response.body"]
    return dict(starts[0]["headers"]), bodies, len(starts)


def test_a_json_answer_begins_with_the_seed_and_has_the_right_length() -> None:
    headers, bodies, starts = answer([b'{"id":"x","choices":[]}'], {"cmpl-1-0": 42})
    assert bodies == [b'{"seed":42,"id":"x","choices":[]}']
    assert headers[b"content-length"] == str(len(bodies[0])).encode()
    assert headers[b"x-other"] == b"1"
    assert starts == 1


def test_a_body_in_pieces_and_an_empty_object() -> None:
    headers, bodies, _ = answer([b"", b'{"a":', b'{"b":1}}'], {"0": -7})
    assert json.loads(b"".join(bodies)) == {"seed": -7, "a": {"b": 1}}
    assert int(headers[b"content-length"]) == sum(map(len, bodies))
    _, bodies, _ = answer([b"{ }"], {"0": 1})
    assert json.loads(bodies[0]) == {"seed": 1}
    headers, bodies, _ = answer([b'{"a":1}'], {"0": 1}, has_length=False)
    assert json.loads(bodies[0]) == {"seed": 1, "a": 1}
    assert b"content-length" not in headers


def test_prompts_with_different_seeds_are_listed_in_their_order() -> None:
    seeds = {f"cmpl-a-{index}": 100 - index for index in (10, 2, 0, 1)}
    _, bodies, _ = answer([b'{"a":1}'], seeds)
    assert json.loads(bodies[0])["seeds"] == [100, 99, 98, 90]
    _, bodies, _ = answer([b'{"a":1}'], dict.fromkeys(seeds, 5))
    assert json.loads(bodies[0]) == {"seed": 5, "a": 1}


def test_the_first_event_of_a_stream_carries_the_seed() -> None:
    pieces = [b": ping\n\n", b'event: begin\ndata: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"]
    _, bodies, starts = answer(pieces, {"chatcmpl-1": 42}, kind=STREAM, has_length=False)
    assert bodies == [pieces[0], b'event: begin\ndata: {"seed":42,"a":1}\n\n', *pieces[2:]]
    assert starts == 1


@pytest.mark.parametrize(
    ("pieces", "seeds", "options"),
    [
        ([b'{"a":1}'], {}, {}),
        ([b'data: {"a":1}\n\n', b"data: [DONE]\n\n"], {}, {"kind": STREAM, "has_length": False}),
        ([b'{"error":1}'], {"0": 1}, {"status": 400}),
        ([b"[1]"], {"0": 1}, {}),
        ([b'[{"a":1}]'], {"0": 1}, {}),
        ([b""], {"0": 1}, {}),
        ([b'{"a":1}'], {"0": 1}, {"kind": b"text/plain"}),
        ([b'{"a":1}'], {"0": 1}, {"method": "GET"}),
    ],
)
def test_other_answers_keep_every_byte(pieces: list[bytes], seeds: dict[str, int], options: dict[str, Any]) -> None:
    headers, bodies, starts = answer(pieces, seeds, **options)
    assert bodies == pieces
    assert starts == 1
    if b"content-length" in headers:
        assert int(headers[b"content-length"]) == sum(map(len, pieces))


def test_answers_that_are_made_at_the_same_time_do_not_share_seeds() -> None:
    async def one(number: int) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def engine() -> None:
                await asyncio.sleep(0.001 * (number % 3))
                noted = SEEDS_OF_RESPONSE.get()
                assert noted is not None
                noted[f"cmpl-{number}-0"] = number

            await asyncio.create_task(engine())  # vLLM too adds requests in tasks of their own
            headers = [(b"content-type", JSON)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"a":1}'})

        async def send(message: Any) -> None:
            sent.append(dict(message))

        scope: dict[str, Any] = {"type": "http", "method": "POST"}
        await SeedMiddleware(app)(scope, None, send)  # type: ignore[arg-type]
        found: dict[str, Any] = json.loads(sent[1]["body"])
        return found

    async def crowd() -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(number) for number in range(30)))

    assert [found["seed"] for found in asyncio.run(crowd())] == list(range(30))
    assert SEEDS_OF_RESPONSE.get() is None


def test_other_connections_pass_through() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        assert SEEDS_OF_RESPONSE.get() is None

    for kind in ("lifespan", "websocket"):
        asyncio.run(SeedMiddleware(app)({"type": kind}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


def test_it_is_a_default_of_a_servers_parser_only() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=[])
    add_to_server(parser)
    add_to_server(parser)
    assert parser.parse_args([]).middleware == [CLASS_PATH]
    assert parser.parse_args(["--middleware", "a.B"]).middleware == [CLASS_PATH, "a.B"]
    other = argparse.ArgumentParser()
    add_to_server(other)
    add_to_server(None)
    assert not hasattr(other.parse_args([]), "middleware")
    module, _, name = CLASS_PATH.rpartition(".")
    assert (module, name) == (SeedMiddleware.__module__, SeedMiddleware.__name__)
