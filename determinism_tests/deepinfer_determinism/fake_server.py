"""A small OpenAI-compatible server in this process, for tests: its answers are hashes, its faults planted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake"
FAULTS = ("crowd", "stream", "asked", "seed", "shared noise", "leak", "restart", "cut", "no logprobs", "busy", "fails")
MAX_PROMPT_CHARS = 2000
STEP_S = 0.002
LAST_SERVED = 60  # request of the fault ``fails`` behind which every one fails


@dataclass(slots=True)
class FakeServer:
    """State of the server. ``fault`` is one of ``FAULTS`` or empty.

    Attributes:
        num_running: requests in progress; the fault ``crowd`` looks at it.
        num_cut: streams whose client left.
    """

    fault: str = ""
    base_url: str = ""
    num_running: int = 0
    num_served: int = 0
    num_cut: int = 0
    last_prompt: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    client_ports: list[int] = field(default_factory=list)

    def app(self, middleware: list[Middleware] | None = None) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._serve, methods=["POST"]),
            Route("/v1/chat/completions", self._serve, methods=["POST"]),
        ]
        return Starlette(routes=routes, middleware=middleware or [])

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _serve(self, request: Request) -> Response:
        body = await request.json()
        is_chat = request.url.path.endswith("chat/completions")
        self.bodies.append(body)
        self.num_served += 1
        if request.client is not None:
            self.client_ports.append(request.client.port)
        if self.fault == "fails" and self.num_served > LAST_SERVED:
            return JSONResponse({"error": {"message": "the engine is dead"}}, status_code=500)
        if self.fault == "busy" and self.num_served % 10 == 0:
            return JSONResponse({"error": {"message": "too many requests"}}, status_code=429)
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        count = body.get("top_logprobs", 0) if is_chat else (body.get("logprobs") or 0)
        if len(prompt) > MAX_PROMPT_CHARS or count > 10:
            return JSONResponse({"error": {"message": "the prompt is too long, or too many logprobs"}}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(self._events(body, prompt, is_chat), media_type="text/event-stream")
        self.num_running += 1
        try:
            await asyncio.sleep(STEP_S * body["max_tokens"])
            rows = [self._row(body, prompt, position) for position in range(body["max_tokens"])]
        finally:
            self.num_running -= 1
        return JSONResponse(self._answer(body, prompt, rows, is_chat, "length"))

    async def _events(self, body: dict[str, Any], prompt: str, is_chat: bool) -> AsyncIterator[str]:
        self.num_running += 1
        num_sent = 0
        try:
            for position in range(body["max_tokens"]):
                await asyncio.sleep(STEP_S)
                reason = "length" if position == body["max_tokens"] - 1 else None
                answer = self._answer(body, prompt, [self._row(body, prompt, position)], is_chat, reason)
                if is_chat:
                    answer["choices"][0]["delta"] = answer["choices"][0].pop("message")
                num_sent += 1
                yield f"data: {json.dumps(answer)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.num_running -= 1
            self.num_cut += num_sent < body["max_tokens"]

    def _row(self, body: dict[str, Any], prompt: str, position: int) -> tuple[int, list[float]]:
        """Token id and six log-probabilities, best first; the chosen token's is the first."""
        seed = body.get("seed") if body.get("temperature") else None
        is_shared = self.fault == "shared noise" and seed is not None
        key = f"{'' if is_shared else prompt} {seed} {position}"
        if self.fault == "seed" and seed is not None:
            key += f" {time.monotonic_ns()}"
        digest = hashlib.sha256(key.encode()).digest()
        scores = sorted((-1.0 - number / 3.0 for number in digest[8:28]), reverse=True)
        wrong = {
            "crowd": self.num_running > 4,
            "stream": bool(body.get("stream")),
            "asked": body.get("logprobs") == 1,
            "restart": True,
            "cut": self.num_cut > 0,
        }
        if wrong.get(self.fault):
            scores[0] = math.nextafter(scores[0], 0.0)
        return int.from_bytes(digest[:2], "little"), scores

    def _answer(
        self, body: dict[str, Any], prompt: str, rows: list[tuple[int, list[float]]], is_chat: bool, reason: str | None
    ) -> dict[str, Any]:
        text = "".join(f"{token:x} " for token, _ in rows)
        if self.fault == "leak" and self.num_running > 4:
            text += self.last_prompt
        self.last_prompt = prompt
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [token for token, _ in rows]
            choice["prompt_token_ids"] = list(prompt.encode())
        asked = bool(body.get("logprobs")) if is_chat else body.get("logprobs") is not None
        if asked and self.fault != "no logprobs":
            choice["logprobs"] = _chat_logprobs(body, rows) if is_chat else _logprobs(body, rows)
        return {"id": "1", "object": "fake", "model": MODEL, "choices": [choice]}


def _logprobs(body: dict[str, Any], rows: list[tuple[int, list[float]]]) -> dict[str, Any]:
    count = body["logprobs"]
    return {
        "tokens": [f"token_id:{token}" for token, _ in rows],
        "token_logprobs": [scores[0] for _, scores in rows],
        "top_logprobs": [{f"token_id:{token + i}": scores[i] for i in range(count + 1)} for token, scores in rows],
    }


def _chat_logprobs(body: dict[str, Any], rows: list[tuple[int, list[float]]]) -> dict[str, Any]:
    def entry(token: int, score: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": score}

    count = body.get("top_logprobs", 0)
    return {
        "content": [
            {**entry(token, scores[0]), "top_logprobs": [entry(token + i, scores[i]) for i in range(count)]}
            for token, scores in rows
        ]
    }


@contextmanager
def serving(fault: str = "", middleware: list[Middleware] | None = None, port: int = 0) -> Iterator[FakeServer]:
    """A running server with one planted fault, or none."""
    assert fault in ("", *FAULTS)
    fake = FakeServer(fault=fault)
    config = uvicorn.Config(fake.app(middleware), host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "fake server: did not start"
        assert time.monotonic() < deadline_s, "fake server: did not start"
        time.sleep(0.01)
    fake.base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(timeout=30)
