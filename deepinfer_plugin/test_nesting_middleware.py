"""Deep bodies are refused, all others reach the server as they came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from deepinfer_plugin.nesting_middleware import MAX_DEPTH, NestingMiddleware, is_too_deep


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", False),
        (nested(MAX_DEPTH), False),
        (nested(MAX_DEPTH + 1), True),
        (b"[" * 1_000_000, True),
        (b'{"a":' * (MAX_DEPTH + 1), True),
        (b"[" + b"[]," * 10_000 + b"0]", False),
        (json.dumps("[{" * 10_000).encode(), False),
        (json.dumps('\\"[' * 10_000).encode(), False),
        (json.dumps(['"\\', json.loads(nested(MAX_DEPTH))]).encode(), True),
        (b"]" * 200 + b"[" * 300, False),
    ],
)
def test_depth_counts_outside_of_texts(body: bytes, expected: bool) -> None:
    assert is_too_deep(body) is expected


def serve(parts: Iterable[bytes], kind: str = "http.request") -> tuple[bytes | None, list[Any]]:
    """What the application read, and what was sent."""
    pieces = list(parts)
    read: list[bytes] = []
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": kind, "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            read.append(message["body"])

    asyncio.run(NestingMiddleware(application)({"type": "http", "method": "POST"}, receive, send))
    return (b"".join(read) if read else None), sent


def test_a_body_arrives_as_it_came_and_the_disconnect_after_it() -> None:
    assert serve([b'{"a": ', b"[1]}"]) == (b'{"a": [1]}', [])


def test_a_deep_body_in_parts_is_refused_with_status_400() -> None:
    read, (start, body) = serve([nested(200)[:150], nested(200)[150:]])
    assert read is None
    assert start["status"] == 400
    assert "nested deeper than 100 levels" in json.loads(body["body"])["error"]["message"]


def test_a_client_that_leaves_is_no_request() -> None:
    assert serve([], "http.disconnect") == (None, [])


def test_the_server_gets_it_once() -> None:
    import argparse

    from deepinfer_plugin.nesting_middleware import CLASS_PATH, add_to_server

    parser = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=[])
    add_to_server(parser)
    add_to_server(parser)
    assert parser.get_default("middleware") == [CLASS_PATH]
    add_to_server(None)
