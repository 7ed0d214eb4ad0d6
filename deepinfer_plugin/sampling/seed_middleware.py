"""ASGI middleware that adds the seed to the server's answers (``--middleware``; on by default with our platform).

A JSON answer, and the first event of a stream, begins with ``"seed": N``, or with ``"seeds": [N, ...]`` where its
prompts were drawn with different ones. Sent back as ``seed`` with the same prompt, it repeats the answer. A JSON answer
whose request asked for ``sum_smaller_probs`` carries them too: a list per prompt, one number per token.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deepinfer_plugin.sampling.front_end import SEEDS_OF_RESPONSE
from deepinfer_plugin.sampling.sums import SUMS_OF_RESPONSE
from deepinfer_plugin.server_middleware import add_middleware

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

CLASS_PATH = f"{__name__}.SeedMiddleware"
_EVENT = b"data: {"


def add_to_server(parser: Any) -> None:
    """See ``add_middleware``."""
    add_middleware(CLASS_PATH, parser)


class SeedMiddleware:
    """Adds to an answer what ``front_end`` noted while it was made; leaves every other answer alone."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        seeds: dict[str, int] = {}
        sums: dict[str, list[float]] = {}
        token, sums_token = SEEDS_OF_RESPONSE.set(seeds), SUMS_OF_RESPONSE.set(sums)
        try:
            await self.app(scope, receive, _Answer(send, seeds, sums))
        finally:
            SEEDS_OF_RESPONSE.reset(token)
            SUMS_OF_RESPONSE.reset(sums_token)


class _Answer:
    """Passes the messages of one answer on; the start of a JSON answer waits for its body, whose length changes."""

    def __init__(self, send: Send, seeds: dict[str, int], sums: dict[str, list[float]]) -> None:
        self._send = send
        self._seeds = seeds
        self._sums = sums
        self._start: Message | None = None
        self._opening = b""  # what the text to change begins with; empty once there is nothing left to change

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type").partition(b";")[0].strip()
            if kind == b"application/json" and message["status"] == 200:
                self._opening, self._start = b"{", message
                return
            self._opening = _EVENT if kind == b"text/event-stream" else b""
        elif message["type"] == "http.response.body" and self._opening:
            if self._start is not None and not message.get("body") and message.get("more_body"):
                return  # nothing to change yet; the start still waits
            added = self._change(message)
            await self._send_start(added)
        await self._send(message)

    def _change(self, message: Message) -> int:
        """Put the field into the first piece that has a place for it; returns the bytes it is longer by."""
        body: bytes = message.get("body", b"")
        head, found, tail = body.partition(self._opening)
        is_json = self._start is not None
        if found or is_json:
            self._opening = b""
        if not found or not (self._seeds or self._sums) or (is_json and head.strip()):
            return 0
        message["body"] = head + found + self._field(tail) + tail
        return len(message["body"]) - len(body)

    async def _send_start(self, added: int) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        start["headers"] = [
            (name, str(int(value) + added).encode() if name.lower() == b"content-length" else value)
            for name, value in start["headers"]
        ]
        await self._send(start)

    def _field(self, tail: bytes) -> bytes:
        values = [seed for _, seed in sorted(self._seeds.items(), key=lambda item: prompt_number(item[0]))]
        field: dict[str, Any] = {}
        if values:
            field = {"seed": values[0]} if len(set(values)) == 1 else {"seeds": values}
        if self._sums:
            field["sum_smaller_probs"] = [self._sums[name] for name in sorted(self._sums, key=prompt_number)]
        return json.dumps(field, separators=(",", ":"))[1:-1].encode() + (b"" if tail.lstrip()[:1] == b"}" else b",")


def prompt_number(request_id: str) -> int:
    """Number of a prompt in its request: vLLM appends it to the ids of completions."""
    number = request_id.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def _header(message: Message, name: bytes) -> bytes:
    return next((bytes(value) for key, value in message["headers"] if key.lower() == name), b"")
