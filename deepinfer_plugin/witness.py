"""What a response carries so that it can be repeated: the seed that was drawn for it and, on request, a witness.

The witness of an answer is four SHA-256 hashes (hex), see ``witness_of``. A third party who holds prompt ids, output
ids and log-probabilities computes it alone; one who holds the request only repeats it and compares the hashes.

``WitnessMiddleware`` is an ASGI middleware for ``vllm serve --middleware deepinfer_plugin.witness.WitnessMiddleware``;
``add_to`` makes it the default of a command line. It loads neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CLASS_PATH = f"{__name__}.WitnessMiddleware"
EXTRA_ARG = "witness"  # key in ``vllm_xargs``: 1 asks for a witness; it is taken out before vLLM sees the request
SEED_EXTRA_ARG = "seq_seed"
RESPONSE_FIELD = "deepinfer"  # of the response, or of a stream's first chunk: {"seed": the seed that was drawn}
SEED_BITS = 53  # every JSON reader keeps such an integer
LAYOUT = b"deepinfer-witness-1\0"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHER_GENERATORS = ("/v1/responses", "/v1/messages", "/inference/v1/generate")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def witness_of(prompt_ids: Sequence[int], output_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, str]:
    """The witness of one answer.

    Args:
        prompt_ids: ids of the prompt as the model read it.
        output_ids: ids of the answer, the stop token included where the server reports it.
        logprobs: log-probability of each token of ``output_ids``, as the server returned it.

    Returns:
        ``prompt`` and ``output``: SHA-256 of the ids as little-endian uint32. ``logprobs``: SHA-256 of the numbers as
        little-endian IEEE doubles. ``all``: SHA-256 of ``LAYOUT`` followed by the three digests, 32 bytes each.

    Raises:
        ValueError: not one log-probability for each output id, or one of them is missing.
    """
    if len(logprobs) != len(output_ids) or any(value is None for value in logprobs):
        raise ValueError(
            f"witness: {len(output_ids)} output ids came with {sum(value is not None for value in logprobs)} "
            "log-probabilities, expected one each; ask without include_reasoning=false and without echo"
        )
    parts = (
        hashlib.sha256(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids)),
        hashlib.sha256(struct.pack(f"<{len(output_ids)}I", *output_ids)),
        hashlib.sha256(struct.pack(f"<{len(logprobs)}d", *logprobs)),
    )
    whole = hashlib.sha256(LAYOUT + b"".join(part.digest() for part in parts))
    prompt, output, scores = (part.hexdigest() for part in parts)
    return {"prompt": prompt, "output": output, "logprobs": scores, "all": whole.hexdigest()}


def add_to(parser: ArgumentParser | None) -> None:
    """Make the middleware a default of a command line that knows ``--middleware``; a user's own ones stay."""
    if parser is None:
        return
    for action in parser._actions:
        if action.dest == "middleware" and isinstance(action.default, list) and CLASS_PATH not in action.default:
            action.default = [*action.default, CLASS_PATH]


@dataclass(slots=True)
class _Tokens:
    """What has arrived of one choice."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """What to do with the response of one request."""

    is_chat: bool
    seed: int | None = None  # the seed that was drawn
    has_witness: bool = False
    hides_ids: bool = False  # the client did not ask for token ids
    hides_logprobs: bool = False
    choices: dict[int, _Tokens] = field(default_factory=dict)

    @property
    def does_nothing(self) -> bool:
        return self.seed is None and not self.has_witness

    def note(self, head: bytes) -> bytes:
        """``head`` with the drawn seed behind its first brace; the rest keeps its bytes."""
        if self.seed is None:
            return head
        text = json.dumps({RESPONSE_FIELD: {"seed": self.seed}})[:-1]
        return head.replace(b"{", text.encode() + b",", 1)

    def with_witness(self, data: bytes) -> bytes:
        """A JSON response, or one chunk of a stream, with the witness of each choice that it ends."""
        value = json.loads(data)
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
            return data
        for choice in value["choices"]:
            tokens = self.choices.setdefault(int(choice.get("index", 0)), _Tokens())
            prompt_ids = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
            tokens.prompt_ids = prompt_ids or tokens.prompt_ids
            new_ids = choice.get("token_ids") or []
            tokens.output_ids += new_ids
            tokens.logprobs += _chosen_logprobs(choice, self.is_chat)[-len(new_ids) :] if new_ids else []
            if self.hides_ids:
                choice.pop("prompt_token_ids", None)
                choice.pop("token_ids", None)
            if self.hides_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
            if choice.get("finish_reason") is not None:
                choice[EXTRA_ARG] = self._witness(int(choice.get("index", 0)))
        if self.hides_ids:
            value.pop("prompt_token_ids", None)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def _witness(self, index: int) -> dict[str, str]:
        tokens = self.choices.pop(index)
        try:
            if not tokens.prompt_ids or not tokens.output_ids:
                raise ValueError("witness: the answer came without token ids, expected a server that returns them")
            return witness_of(tokens.prompt_ids, tokens.output_ids, tokens.logprobs)
        except ValueError as error:
            return {"error": str(error)}


class WitnessMiddleware:
    """Draws a seed for a sampled request that has none, and returns it; adds a witness where one is asked for.

    A request asks with ``"vllm_xargs": {"witness": 1}``. Its answer then carries ``choices[i].witness``, in a stream on
    the chunk that ends the choice. Everything else of request and response is passed on unchanged.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = str(scope.get("path", ""))
        is_ours = scope["type"] == "http" and scope.get("method") == "POST"
        if not is_ours or not path.endswith((COMPLETIONS, CHAT, *OTHER_GENERATORS)):
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        if path.endswith(OTHER_GENERATORS):
            if _asks_for_witness(_object(body)):
                await _refuse(send, f"witness: {path} does not carry one, expected {COMPLETIONS} or {CHAT}; ask there")
                return
            plan = _Plan(is_chat=False)
        else:
            body, plan = _prepare(body, path.endswith(CHAT))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        answer = send if plan.does_nothing else _Rewriter(plan, send)
        await self._app(scope, _replay(body, receive), answer)


class _Rewriter:
    """Send side of one response: collects a JSON body, or passes a stream on event by event."""

    def __init__(self, plan: _Plan, send: Send) -> None:
        self._plan = plan
        self._send = send
        self._start: Message | None = None
        self._kind = ""
        self._pending = b""
        self._is_first_event = True

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", [])}
            kind = headers.get(b"content-type", b"").partition(b";")[0].decode()
            is_known = message["status"] == 200 and kind in ("application/json", "text/event-stream")
            self._kind = kind if is_known else ""
            self._start = message
            if self._kind != "application/json":
                await self._send(message)
        elif message["type"] != "http.response.body" or not self._kind:
            await self._send(message)
        elif self._kind == "application/json":
            await self._json(message)
        else:
            await self._events(message)

    async def _json(self, message: Message) -> None:
        self._pending += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = self._plan.with_witness(self._pending) if self._plan.has_witness else self._pending
        body = self._plan.note(body)
        assert self._start is not None
        headers = [(name, value) for name, value in self._start["headers"] if bytes(name).lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({**message, "body": body})

    async def _events(self, message: Message) -> None:
        *events, self._pending = (self._pending + message.get("body", b"")).split(b"\n\n")
        is_last = not message.get("more_body", False)
        body = b"".join(self._event(event) + b"\n\n" for event in events)
        if is_last:
            body += self._pending
        if body or is_last:
            await self._send({**message, "body": body})

    def _event(self, event: bytes) -> bytes:
        name, separator, data = event.partition(b"data: ")
        if name or not separator or not data.startswith(b"{"):
            return event
        if self._plan.has_witness:
            data = self._plan.with_witness(data)
        if self._is_first_event:
            data = self._plan.note(data)
            self._is_first_event = False
        return separator + data


def _prepare(body: bytes, is_chat: bool) -> tuple[bytes, _Plan]:
    """The body for vLLM, and what to do with the answer; a body that is no JSON object is left to vLLM to refuse."""
    plan = _Plan(is_chat=is_chat)
    value = _object(body)
    if value is None:
        return body, plan
    given = value.get("vllm_xargs")
    extra = dict(given) if isinstance(given, dict) else {}
    is_changed = EXTRA_ARG in extra
    if is_changed:
        plan.has_witness = _asks_for_witness(value)
        del extra[EXTRA_ARG]
        value["vllm_xargs"] = extra or None
    if plan.has_witness:
        plan.hides_ids = not value.get("return_token_ids")
        value["return_token_ids"] = True
        plan.hides_logprobs = not value.get("logprobs") if is_chat else value.get("logprobs") is None
        if plan.hides_logprobs:
            value["logprobs"] = True if is_chat else 0
    if value.get("seed") is None and SEED_EXTRA_ARG not in extra and value.get("temperature") != 0:
        plan.seed = value["seed"] = secrets.randbits(SEED_BITS)
        is_changed = True
    return (json.dumps(value).encode() if is_changed else body), plan


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _asks_for_witness(value: dict[str, Any] | None) -> bool:
    extra = (value or {}).get("vllm_xargs")
    return (
        isinstance(extra, dict) and bool(extra.get(EXTRA_ARG)) and str(extra[EXTRA_ARG]).lower() not in ("0", "false")
    )


def _chosen_logprobs(choice: dict[str, Any], is_chat: bool) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if is_chat:
        return [entry["logprob"] for entry in logprobs.get("content") or []]
    return list(logprobs.get("token_logprobs") or [])


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or None where the client is gone before it was complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive side that hands out ``body`` once, then what the connection says (a disconnect)."""
    first = [body]

    async def replayed() -> Message:
        if first:
            return {"type": "http.request", "body": first.pop(), "more_body": False}
        return await receive()

    return replayed


async def _refuse(send: Send, text: str) -> None:
    body = json.dumps({"error": {"message": text, "type": "BadRequestError", "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
