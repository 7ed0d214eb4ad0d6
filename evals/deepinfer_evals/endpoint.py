"""One question to an OpenAI-compatible server over HTTP, and what comes back: text, token ids, hashes, seed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import httpx

from deepinfer_plugin.errors import EngineError
from deepinfer_plugin.provenance_endpoint import PATH as PROVENANCE_PATH
from deepinfer_plugin.witness import CHAT, witness_of

CONNECT_S = 10.0
PROVENANCE_S = 3600.0  # the first answer waits for the hash of every file of the checkpoint
FLAGS = {"server": ("--base-url", "--api-key-file"), "judge": ("--judge-url", "--judge-key-file")}
BUSY = (408, 409, 429, 500, 502, 503, 504)


class RefusedError(EngineError):
    """The server answered that it will not do this; asking again would not help."""


class DeniedError(RefusedError):
    """The server wants another key."""


class BusyError(EngineError):
    """The server did not answer, or not now: the same question may be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        text: what follows the reasoning; "" where nothing does.
        reasoning: the reasoning, where the server tells it apart.
        finish_reason: ``stop``, or ``length`` where a limit cut it.
        seed: the one it was drawn with, as the server returned it, else as it was sent.
        prompt_tokens: length of the prompt.
        token_ids: of the whole answer, four bytes each: a run can hold a hundred million of them.
        witness: hashes of prompt ids, output ids and log-probabilities, see ``deepinfer_plugin.witness``.
    """

    text: str
    reasoning: str
    finish_reason: str
    seed: int
    prompt_tokens: int
    token_ids: array[int]
    witness: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**value, "token_ids": self.token_ids.tolist(), "witness": dict(self.witness)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """The inverse of ``to_json``."""
        return cls(**{**value, "token_ids": array("I", value["token_ids"])})

    @property
    def is_truncated(self) -> bool:
        """A limit of length ended it."""
        return self.finish_reason == "length"


class Endpoint:
    """A server and one of its models, used as an asynchronous context; ``role`` says which one, in messages."""

    def __init__(
        self,
        base_url: str,
        model: str = "",
        *,
        api_key: str = "",
        timeout_s: float | None = None,
        slots: int = 64,
        role: str = "server",
    ) -> None:
        self._role = role
        self._url_flag, self._key_flag = FLAGS[role]
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.has_witness = True  # where it has none, log-probabilities are asked for and hashed here
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=max(slots, 8)),
                trust_env=False,  # a proxy between client and a local server would be another party to the result
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise EngineError(
                f"{role}: {self._url_flag} is {base_url!r} ({error}), expected http://HOST:PORT"
            ) from None
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise EngineError(f"{role}: {self._url_flag} is {base_url!r}, expected http://HOST:PORT or https://HOST")

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models that it serves."""
        value = await self._get("/v1/models")
        try:
            return [str(entry["id"]) for entry in value["data"]]
        except (KeyError, TypeError):
            raise EngineError(
                f"{self._role}: {self.base_url}/v1/models has no list of models, expected an OpenAI-compatible server; "
                f"check {self._url_flag}"
            ) from None

    async def version(self) -> str:
        """Version that the server reports, or ``unknown``."""
        try:
            return str((await self._get("/version"))["version"])
        except (EngineError, KeyError, TypeError):
            return "unknown"

    async def provenance(self) -> dict[str, Any] | None:
        """What the server says of itself, see ``deepinfer_plugin.provenance_endpoint``; None where it is another's."""
        try:
            value = await self._get(PROVENANCE_PATH, timeout_s=PROVENANCE_S)
        except RefusedError:
            return None
        return value if isinstance(value, dict) else None

    async def ask(self, prompt: str, body: Mapping[str, Any], seed: int | None) -> Answer:
        """One answer to one user message.

        Args:
            prompt: the message, sent as it is.
            body: sampling parameters as fields of the request.
            seed: None leaves the draw to the server.

        Raises:
            RefusedError: it refused, or returned no token ids.
            BusyError: no answer, or a transient one.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            **body,
            "n": 1,
            "return_token_ids": True,
        }
        if seed is not None:
            request["seed"] = seed
        if self.has_witness:
            request["vllm_xargs"] = {"witness": 1}
        else:
            request["logprobs"] = True
        value = await self._post(CHAT, request)
        try:
            return self._answer(value, seed)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise RefusedError(
                f"server: {self.base_url}{CHAT} answered without what an evaluation needs ({type(error).__name__}: "
                f"{error}), expected token ids and a witness or log-probabilities; vLLM 0.33 returns them"
            ) from None

    async def chat(self, prompt: str, body: Mapping[str, Any]) -> str:
        """Text of one answer of a server from which nothing but text is expected, such as a judge's."""
        request = {"model": self.model, "messages": [{"role": "user", "content": prompt}], **body}
        value = await self._post(CHAT, request)
        try:
            return str(value["choices"][0]["message"]["content"] or "")
        except (KeyError, TypeError, IndexError):
            raise RefusedError(f"judge: {self.base_url}{CHAT} answered without a message, expected one") from None

    def _answer(self, value: Mapping[str, Any], seed: int | None) -> Answer:
        choice = value["choices"][0]
        message = choice["message"]
        ids = array("I", choice["token_ids"])
        if self.has_witness:
            witness = dict(choice["witness"])
            if "error" in witness:
                raise ValueError(witness["error"])
        else:
            scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            prompt_ids = choice.get("prompt_token_ids") or value["prompt_token_ids"]
            witness = witness_of(prompt_ids, ids, scores)
        drawn = value.get("seed", seed)
        return Answer(
            text=message.get("content") or "",
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            finish_reason=str(choice["finish_reason"]),
            seed=-1 if drawn is None else int(drawn),
            prompt_tokens=int(value["usage"]["prompt_tokens"]),
            token_ids=ids,
            witness=witness,
        )

    async def _get(self, path: str, timeout_s: float = 30.0) -> Any:
        try:
            response = await self._http.get(path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BusyError(self._unreachable(error)) from None
        return self._value(path, response)

    async def _post(self, path: str, request: Mapping[str, Any]) -> Any:
        try:
            response = await self._http.post(path, json=request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BusyError(self._unreachable(error)) from None
        return self._value(path, response)

    def _value(self, path: str, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            raise DeniedError(
                f"{self._role}: {self.base_url} refused the key ({response.status_code}), expected to be let in; "
                f"pass {self._key_flag}"
            )
        if response.status_code != 200:
            text = " ".join(response.text.split())[:300]
            kind = BusyError if response.status_code in BUSY else RefusedError
            raise kind(f"{self._role}: {self.base_url}{path} answered {response.status_code}: {text}")
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise RefusedError(
                f"{self._role}: {self.base_url}{path} answered no JSON, expected it; check {self._url_flag}"
            ) from None

    def _unreachable(self, error: Exception) -> str:
        return (
            f"{self._role}: {self.base_url} cannot be reached ({type(error).__name__}: {error}), expected a running "
            f"server; check {self._url_flag}"
        )
