"""Client of an OpenAI-compatible server: answers with the bits of their log-probabilities, within a budget."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from deepinfer_kernels.errors import DeepInferError

BUSY = (429, 503)  # HTTP codes after which a request is sent again
MAX_TRIES = 6
RETRY_S = 0.5
# Servers close an idle connection after a few seconds, vLLM's after 5 s, as httpx does: whoever reuses it then loses.
KEEP_IDLE_S = 1.0
TOKEN_ID_FIELDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}  # vLLM and SGLang; left out if refused


class EndpointError(DeepInferError):
    """The server cannot be reached, does not know the model, or refuses what the test needs."""


class BudgetSpentError(DeepInferError):
    """The limit of requests is reached; what was found so far stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``logprobs`` None asks for none, n for those of the n best tokens besides the chosen one."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion.

    Attributes:
        tokens: one word per output token, ``token_id:N`` where the server names ids; empty where it names none.
        logprobs: of the chosen tokens, as the doubles that came; empty where none were asked for.
        top: per token the other scored tokens, best first as the server sent them.
        begin_s, end_s: on the clock of ``time.monotonic``.
        was_cut: the client closed the stream before its end.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[str, float], ...], ...]
    finish_reason: str | None
    begin_s: float = 0.0
    end_s: float = 0.0
    was_cut: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 over everything but the times."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values; a double is written as the 16 hex digits of its bytes, most significant first."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "logprobs": [double_bits(value) for value in self.logprobs],
            "top": [[[token, double_bits(value)] for token, value in row] for row in self.top],
            "finish_reason": self.finish_reason,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """The answer that ``to_json`` wrote; KeyError, TypeError or ValueError where it is something else."""
        return cls(
            text=str(value["text"]),
            tokens=tuple(value["tokens"]),
            logprobs=tuple(double_of(bits) for bits in value["logprobs"]),
            top=tuple(tuple((token, double_of(bits)) for token, bits in row) for row in value["top"]),
            finish_reason=value["finish_reason"],
        )


def double_bits(value: float) -> str:
    """16 hex digits of an IEEE double, most significant first."""
    return struct.pack(">d", value).hex()


def double_of(bits: str) -> float:
    """The double that ``double_bits`` wrote."""
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


@dataclass(slots=True)
class _Parts:
    """What has arrived of an answer."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[str, float], ...]] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or delta.get("reasoning") or ""
        self.text += delta.get("content") or ""
        self.ids += [f"token_id:{number}" for number in choice.get("token_ids") or ()]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        logprobs = choice.get("logprobs") or {}
        for entry in logprobs.get("content") or ():  # chat
            self.tokens.append(entry["token"])
            self.logprobs.append(float(entry["logprob"]))
            self.top.append(tuple((one["token"], float(one["logprob"])) for one in entry.get("top_logprobs") or ()))
        if logprobs.get("token_logprobs"):  # completions
            self.tokens += logprobs["tokens"]
            self.logprobs += [float(value) for value in logprobs["token_logprobs"]]
            rows = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
            self.top += [tuple((token, float(value)) for token, value in (row or {}).items()) for row in rows]

    def answer(self, begin_s: float, *, was_cut: bool = False) -> Answer:
        return Answer(
            text=self.text,
            tokens=tuple(self.tokens or self.ids),
            logprobs=tuple(self.logprobs),
            top=tuple(self.top),
            finish_reason=self.finish_reason,
            begin_s=begin_s,
            end_s=time.monotonic(),
            was_cut=was_cut,
        )


class Endpoint:
    """One server, used as an asynchronous context.

    Args:
        base_url: with or without ``/v1`` at its end.
        model: name the server knows the model by.
        api_key: sent as bearer token; None sends none.
        use_chat: ask ``/v1/chat/completions`` instead of ``/v1/completions``.
        max_requests: after so many requests ``BudgetSpentError`` is raised.
        max_connections: most requests at once; further ones wait here.
        timeout_s: longest time without a byte from the server.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        use_chat: bool = False,
        max_requests: int = 10_000,
        max_connections: int = 1000,
        timeout_s: float = 300.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model, self.max_requests = model, max_requests
        self.num_requests = self.num_retries = 0
        self._use_chat = use_chat
        self._extra: dict[str, Any] = dict(TOKEN_ID_FIELDS)
        self._slots = asyncio.Semaphore(max_connections)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=64, keepalive_expiry=KEEP_IDLE_S
        )
        try:
            self._http = httpx.AsyncClient(base_url=self.base_url, headers=headers, limits=limits, timeout=timeout_s)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise EndpointError(f"certify: --base-url is {base_url!r} ({error}), expected http://HOST:PORT") from None

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def check(self) -> dict[str, Any]:
        """Ask for the models and for one token with its log-probability.

        Returns:
            What the server says of itself: version, where it has one, and the entry of the model.

        Raises:
            EndpointError: unreachable, key refused, model unknown, or no log-probabilities.
        """
        response = await self._get("/v1/models")
        if response.status_code in (401, 403):
            raise EndpointError(f"certify: {self.base_url} refused the key ({response.status_code}); pass --api-key")
        try:
            models = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise EndpointError(
                f"certify: {self.base_url}/v1/models answered {response.status_code} without a list of models, "
                "expected an OpenAI-compatible server; check --base-url"
            ) from None
        if self.model not in models:
            raise EndpointError(
                f"certify: --model is {self.model!r}, expected one that {self.base_url} serves: "
                f"{', '.join(sorted(models)) or 'it lists none'}"
            )
        ask = Ask(prompt="one", max_tokens=1, logprobs=1)
        try:
            answer = await self.complete(ask)
        except EndpointError:
            self._extra = {}  # a server that refuses fields it does not know
            answer = await self.complete(ask)
        if not answer.logprobs:
            raise EndpointError(
                f"certify: {self.base_url} returned no log-probabilities for {self.model!r}, expected one per token; "
                "without them only texts could be compared: start the server with log-probabilities on"
            )
        return {"version": await self._version(), "model": models[self.model]}

    async def complete(self, ask: Ask) -> Answer:
        """The whole answer in one piece.

        Raises:
            EndpointError: the server refused the request or stopped answering.
            BudgetSpentError: the limit of requests is reached.
        """
        async with self._response(ask, is_stream=False) as (response, begin_s):
            try:
                value = json.loads(await response.aread())
                parts = _Parts()
                parts.take(value["choices"][0])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise EndpointError(
                    f"certify: {self._path} answered something else than a completion ({error})"
                ) from None
            return parts.answer(begin_s)

    async def stream(self, ask: Ask, cut_after: int | None = None) -> Answer:
        """The answer piece by piece; ``cut_after`` closes the connection after so many pieces."""
        async with self._response(ask, is_stream=True) as (response, begin_s):
            parts, num_pieces = _Parts(), 0
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                value = json.loads(line.removeprefix("data: "))
                if "error" in value:
                    raise EndpointError(f"certify: {self._path} ended a stream with {value['error']}")
                for choice in value.get("choices") or ():
                    parts.take(choice)
                num_pieces += 1
                if cut_after is not None and num_pieces >= cut_after and parts.finish_reason is None:
                    return parts.answer(begin_s, was_cut=True)
            return parts.answer(begin_s)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._use_chat else "/v1/completions"

    def _body(self, ask: Ask, *, is_stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": is_stream,
            **self._extra,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        if self._use_chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
            if ask.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": ask.logprobs}
        else:
            body["prompt"] = ask.prompt
            if ask.logprobs is not None:
                body["logprobs"] = ask.logprobs
        return body

    @asynccontextmanager
    async def _response(self, ask: Ask, *, is_stream: bool) -> AsyncIterator[tuple[httpx.Response, float]]:
        """An open, successful response and the time at which its request was sent."""
        body = self._body(ask, is_stream=is_stream)
        async with self._slots:
            for attempt in range(MAX_TRIES):
                if self.num_requests >= self.max_requests:
                    raise BudgetSpentError(f"certify: --requests-limit {self.max_requests} is reached")
                self.num_requests += 1
                begin_s = time.monotonic()
                try:
                    async with self._http.stream("POST", self._path, json=body) as response:
                        if response.status_code == 200:
                            yield response, begin_s
                            return
                        text = (await response.aread()).decode(errors="replace")
                        if response.status_code not in BUSY or attempt == MAX_TRIES - 1:
                            raise EndpointError(_refusal(self.base_url, self._path, response.status_code, text))
                except httpx.HTTPError as error:
                    raise EndpointError(_unreachable(self.base_url, error)) from None
                self.num_retries += 1
                await asyncio.sleep(RETRY_S * 2**attempt)

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(_unreachable(self.base_url, error)) from None

    async def _version(self) -> str:
        try:
            response = await self._http.get("/version")
            return str(response.json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return "unknown"


def _unreachable(base_url: str, error: Exception) -> str:
    return (
        f"certify: {base_url} cannot be reached ({type(error).__name__}: {error}), expected a running server; "
        "check --base-url"
    )


def _refusal(base_url: str, path: str, code: int, text: str) -> str:
    try:
        value = json.loads(text)
        error = value.get("error", value)
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        message = text
    return f"certify: {base_url}{path} answered {code}: {' '.join(message.split())[:300]}"
