"""What an answer carries on request: its witness, its provenance (``answer_provenance``), the facts of its drafts.

A witness is four SHA-256 hashes (hex) of the answer, see ``witness_of``, so that a third party can repeat one request
and compare. Who holds prompt ids, output ids and log-probabilities computes them alone; who holds the request only
sends it again, with the seed that the answer names, and compares.

``WitnessMiddleware`` is an ASGI middleware for ``vllm serve --middleware deepinfer_plugin.witness.WitnessMiddleware``;
``add_to_server`` makes it the default of a command line. Importing it loads neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_plugin.answer_provenance import of_answer
from deepinfer_plugin.sampling.extras import DRAFT_FACTS
from deepinfer_plugin.sampling.front_end import reported_seed
from deepinfer_plugin.sampling.seed_middleware import prompt_number
from deepinfer_plugin.sampling.seeds import SEED_MODULUS
from deepinfer_plugin.server_middleware import add_middleware
from deepinfer_plugin.speculative.facts import FACTS_OF_RESPONSE, Facts

CLASS_PATH = f"{__name__}.WitnessMiddleware"
WITNESS = "witness"  # keys in ``vllm_xargs``: 1 asks for it; they are taken out before vLLM sees the request
PROVENANCE = "provenance"
KEYS = (WITNESS, PROVENANCE, DRAFT_FACTS)  # the last one is the engine's own and stays
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


def add_to_server(parser: Any) -> None:
    """See ``add_middleware``."""
    add_middleware(CLASS_PATH, parser)


@dataclass(slots=True)
class _Tokens:
    """What has arrived of one choice."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """What to do with the response to one request."""

    is_chat: bool
    wants_witness: bool = True
    wants_provenance: bool = False
    wants_facts: bool = False
    samples_per_prompt: int = 1
    seeds: list[int] = field(default_factory=list)  # one per prompt, or one for all; from the first piece of the answer
    hides_ids: bool = False  # the client did not ask for token ids
    hides_logprobs: bool = False
    choices: dict[int, _Tokens] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)  # by vLLM's request id, filled while the answer is made

    def complete(self, data: bytes) -> bytes:
        """A JSON response, or one chunk of a stream, with what was asked for beside each choice that it ends."""
        value = json.loads(data)
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
            return data
        self.seeds = value.get("seeds", [value["seed"]] if "seed" in value else self.seeds)
        for choice in value["choices"]:
            index = int(choice.get("index", 0))
            if self.wants_witness:
                self._collect(value, choice, self.choices.setdefault(index, _Tokens()))
            if choice.get("finish_reason") is not None:
                if self.wants_witness:
                    choice[WITNESS] = self._witness(index)
                if self.wants_provenance:
                    choice[PROVENANCE] = of_answer(self._seed(index))
                if self.wants_facts:
                    choice[DRAFT_FACTS] = self._facts(index)
        if self.wants_witness and self.hides_ids:
            value.pop("prompt_token_ids", None)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def _collect(self, value: dict[str, Any], choice: dict[str, Any], tokens: _Tokens) -> None:
        """Keep the ids and log-probabilities of a piece, and take out of it what the client did not ask for."""
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

    def _seed(self, index: int) -> int | None:
        """Seed of one choice: sample i of a prompt is drawn with the prompt's seed + i."""
        prompt, sample = divmod(index, self.samples_per_prompt)
        if not self.seeds:
            return None
        return reported_seed((self.seeds[min(prompt, len(self.seeds) - 1)] + sample) % SEED_MODULUS)

    def _facts(self, index: int) -> Facts | dict[str, str]:
        """Of one choice: a request that asks has one sample per prompt."""
        names = sorted(self.facts, key=prompt_number)
        if index < len(names):
            return self.facts[names[index]]
        return {
            "error": "draft_facts: the model that serves is not the plugin's, expected ours; see the status command"
        }

    def _witness(self, index: int) -> dict[str, str]:
        tokens = self.choices.pop(index)
        try:
            if not tokens.prompt_ids or not tokens.output_ids:
                raise ValueError("witness: the answer came without token ids, expected a server that returns them")
            return witness_of(tokens.prompt_ids, tokens.output_ids, tokens.logprobs)
        except ValueError as error:
            return {"error": str(error)}


class WitnessMiddleware:
    """Adds what a request asks for to its answer; leaves every other answer alone.

    A request asks with ``"vllm_xargs": {"witness": 1, "provenance": true, "draft_facts": true}``. Its answer then has
    ``choices[i].witness``, ``choices[i].provenance`` and ``choices[i].draft_facts``, in a stream on the chunk that ends
    the choice. Everything else of request and response is passed on unchanged.
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
        asked = [key for key in KEYS if _asks_for(_object(body), key)]
        if path.endswith(OTHER_GENERATORS) and asked:
            await _refuse(send, f"{asked[0]}: {path} does not carry one, expected {COMPLETIONS} or {CHAT}; ask there")
            return
        plan = None
        if not path.endswith(OTHER_GENERATORS):
            body, plan = _prepare(body, path.endswith(CHAT))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        if plan is None:
            await self._app(scope, _replay(body, receive), send)
            return
        token = FACTS_OF_RESPONSE.set(plan.facts)
        try:
            await self._app(scope, _replay(body, receive), _Rewriter(plan, send))
        finally:
            FACTS_OF_RESPONSE.reset(token)


class _Rewriter:
    """Send side of one response: collects a JSON body, or passes a stream on event by event."""

    def __init__(self, plan: _Plan, send: Send) -> None:
        self._plan = plan
        self._send = send
        self._start: Message | None = None
        self._kind = ""
        self._pending = b""

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
        body = self._plan.complete(self._pending)
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
        return separator + self._plan.complete(data)


def _prepare(body: bytes, is_chat: bool) -> tuple[bytes, _Plan | None]:
    """The body for vLLM, and what to do with the answer; None and the same bytes where nothing is asked for."""
    value = _object(body)
    extra = (value or {}).get("vllm_xargs")
    if value is None or not isinstance(extra, dict) or not set(KEYS) & set(extra):
        return body, None
    plan = _Plan(
        is_chat=is_chat,
        wants_witness=_asks_for(value, WITNESS),
        wants_provenance=_asks_for(value, PROVENANCE),
        wants_facts=_asks_for(value, DRAFT_FACTS),
        samples_per_prompt=value["n"] if type(value.get("n")) is int and value["n"] > 0 else 1,
    )
    value["vllm_xargs"] = {key: content for key, content in extra.items() if key not in (WITNESS, PROVENANCE)} or None
    if plan.wants_witness:
        plan.hides_ids = not value.get("return_token_ids")
        value["return_token_ids"] = True
        plan.hides_logprobs = not value.get("logprobs") if is_chat else value.get("logprobs") is None
        if plan.hides_logprobs:
            value["logprobs"] = True if is_chat else 0
    is_needed = plan.wants_witness or plan.wants_provenance or plan.wants_facts
    return json.dumps(value).encode(), plan if is_needed else None


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _asks_for(value: dict[str, Any] | None, key: str) -> bool:
    extra = (value or {}).get("vllm_xargs")
    return isinstance(extra, dict) and bool(extra.get(key)) and str(extra[key]).lower() not in ("0", "false")


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
