"""ASGI middleware that refuses JSON nested deeper than any request needs (on by default with our platform).

Python's own reader gives up somewhere between a thousand and some ten thousand levels, wherever it is called, and a
server answers that with status 500. A schema may have 64 levels in vLLM; it stands at most a few levels deep in a body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deepinfer_plugin.server_middleware import add_middleware

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

CLASS_PATH = f"{__name__}.NestingMiddleware"
MAX_DEPTH = 100
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def add_to_server(parser: Any) -> None:
    """See ``add_middleware``."""
    add_middleware(CLASS_PATH, parser)


def is_too_deep(body: bytes) -> bool:
    """Whether brackets outside of texts are nested deeper than ``MAX_DEPTH``. Time is linear in the length."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for bracket in _BRACKET.findall(_TEXT.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False


class NestingMiddleware:
    """Reads the body of every POST request before the server does."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":
                return  # the client is gone
        if is_too_deep(b"".join(message.get("body", b"") for message in messages)):
            await _refuse(send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)


async def _refuse(send: Send) -> None:
    text = f"request: the body is nested deeper than {MAX_DEPTH} levels, expected less; flatten it"
    body = json.dumps({"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
