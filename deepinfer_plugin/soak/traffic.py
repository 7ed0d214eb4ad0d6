"""The requests of a soak: good ones, whose answers are compared, and hostile ones, which must be refused or survived.

Everything here is data. Prompts are lower-case words, which the small checkpoints' tokenizer knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_plugin.grammar.hostile import HOSTILE

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
REFUSED = frozenset({400, 404, 413, 422})
CONTROL_TEXT = (
    "<｜begin▁of▁sentence｜><｜User｜></think><｜Assistant｜>｜DSML｜<｜end▁of▁sentence｜><｜deepseek_image｜>"
)
_FIELD_OF_KIND = {"json": "json", "regex": "regex", "grammar": "grammar"}
_WORDS = (
    *("the", "sea", "is", "as", "calm", "as", "a", "stone", "on", "the", "road", "to", "the", "inn"),
    *("and", "no", "one", "is", "at", "the", "door"),
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request.

    ``body`` None stands for ``raw``, bytes that are sent as they are. ``leaves_after`` closes the connection after so
    many bytes of the answer. ``expected`` are the statuses that are right.
    """

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    raw: bytes = field(default=b"", repr=False)
    leaves_after: int | None = None
    expected: frozenset[int] = frozenset({200})

    def payload(self, model: str) -> bytes:
        """The bytes to send; the model's name is filled in where there is none."""
        if self.body is None:
            return self.raw
        return json.dumps({"model": model, **self.body}).encode()


def _text(number: int, words: int) -> str:
    return " ".join(_WORDS[(number + i * (1 + number % 5)) % len(_WORDS)] for i in range(words))


def _good() -> list[Call]:
    calls: list[Call] = []

    def chat(name: str, text: str, **fields: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "seed": 11, **fields}
        calls.append(Call(name=name, path=CHAT, body={"logprobs": True, "return_token_ids": True, **body}))

    def complete(name: str, text: str, **fields: Any) -> None:
        body = {"prompt": text, "max_tokens": 16, "seed": 5, "logprobs": 2, "return_token_ids": True, **fields}
        calls.append(Call(name=name, path=COMPLETIONS, body=body))

    for number in range(10):
        complete(f"drawn {number}", _text(number, 5 + 9 * number), temperature=1.0, seed=number)
    for number in range(4):
        complete(f"greedy {number}", _text(number, 30), temperature=0.0)
        chat(f"chat {number}", _text(number, 12 * number), temperature=1.0, seed=number)
    complete("two", _text(1, 8), n=2, temperature=1.0)
    complete("restricted", _text(2, 8), temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, presence_penalty=0.5)
    complete("top k", _text(3, 9), temperature=1.0, vllm_xargs={"force_top_k": 7})
    complete("blacklist", _text(4, 9), temperature=1.0, vllm_xargs={"token_blacklist": "10-80,90"})
    complete("golden", _text(5, 9), temperature=0.0, vllm_xargs={"golden_token_ids": [20, 21, 22, 23]})
    complete("cap", _text(6, 9), temperature=1.0, vllm_xargs={"context_cap": 60})
    chat("control text", CONTROL_TEXT, temperature=1.0)
    chat("no thinking", _text(7, 7), temperature=1.0, reasoning_effort="none")
    chat("effort", _text(7, 7), temperature=1.0, chat_template_kwargs={"reasoning_effort": 3})
    chat("tools", _text(8, 7), temperature=1.0, tools=[TOOL], tool_choice="none")
    answer: dict[str, Any] = {"temperature": 1.0, "reasoning_effort": "none"}
    chat("json", _text(9, 7), **answer, structured_outputs={"json": SCHEMA})
    chat("regex", _text(10, 7), **answer, structured_outputs={"regex": "[a-c]{3,9}"})
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    chat("response format", _text(10, 9), **answer, response_format=schema)
    so_args = {"schema_type": "ebnf", "schema": 'root ::= ("go" | "stop") " " root | "end"'}
    complete("so_args", _text(11, 7), temperature=1.0, vllm_xargs={"so_args": json.dumps(so_args)})
    triggered = {**so_args, "trigger_token_ids": [7, 8], "bound_token_id": 30}
    complete("trigger", _text(12, 7), temperature=1.0, vllm_xargs={"so_args": json.dumps(triggered)})
    return calls


def _deep(depth: int, place: str) -> Call:
    """A body that is nested in one place; as bytes, since Python cannot write the deepest."""
    mark = "deep"
    tool = {"type": "function", "function": {"name": "f", "parameters": mark}}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "none"}
    places: dict[str, tuple[str, dict[str, Any]]] = {
        "schema": (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": mark}}),
        "tool": (CHAT, {**chat, "tools": [tool]}),
        "template": (CHAT, {**chat, "tools": [TOOL], "chat_template_kwargs": {"a": mark}}),
    }
    path, fields = places[place]
    body = json.dumps({"model": "m", "max_tokens": 1, **fields}).encode()
    raw = body.replace(f'"{mark}"'.encode(), b'{"a":' * depth + b"{}" + b"}" * depth)
    expected = REFUSED if depth > 100 else frozenset({200, *REFUSED})
    return Call(name=f"{place} of depth {depth}", path=path, raw=raw, expected=expected)


def _hostile() -> list[Call]:
    calls: list[Call] = []

    def bad(name: str, path: str, expected: frozenset[int] = REFUSED, **body: Any) -> None:
        calls.append(Call(name=name, path=path, body=body, expected=expected))

    for name, (kind, text) in HOSTILE.items():
        bad(f"constraint {name}", COMPLETIONS, prompt="a", structured_outputs={_FIELD_OF_KIND[kind]: text})
    for name, value in {
        "force_top_k": 0,
        "token_blacklist": "0-100000",
        "golden_token_ids": [-1],
        "context_cap": 1,
        "so_args": "{",
        "seq_seed": "x",
    }.items():
        bad(f"extra {name}", COMPLETIONS, prompt="a b c", vllm_xargs={name: value})
    bad("long prompt", COMPLETIONS, prompt="a " * 20_000)
    bad("many tokens", COMPLETIONS, prompt="a", max_tokens=10**9)
    bad("ids outside", COMPLETIONS, prompt=[10**6])
    bad("temperature", COMPLETIONS, prompt="a", temperature=-1)
    bad("logit bias", COMPLETIONS, prompt="a", logit_bias={"999999": 1})
    calls += [_deep(depth, place) for depth in (60, 120, 900, 5_000) for place in ("schema", "tool", "template")]
    bad("role", CHAT, messages=[{"role": "root", "content": "a"}])
    bad("no messages", CHAT, messages=[])
    bad("image", CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
    bad("effort 101", CHAT, messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"reasoning_effort": 101})
    bad("other model", COMPLETIONS, model="other", prompt="a")
    bad("templates", CHAT, messages=[{"role": "user", "content": "a"}], chat_template="{{ 1/0 }}")
    surrogate = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}'
    for name, path, raw in (
        ("no JSON", CHAT, b"{"),
        ("no text", CHAT, b"\xff\xfe\x00"),
        ("deep body", CHAT, b"[" * 200_000),
        ("empty body", COMPLETIONS, b""),
        ("surrogate", CHAT, surrogate),
    ):
        calls.append(Call(name=name, path=path, raw=raw, expected=REFUSED))
    stream = {"prompt": "a b c", "stream": True, "max_tokens": 200, "ignore_eos": True}
    calls.append(Call(name="leaves a stream", path=COMPLETIONS, body=stream, leaves_after=200))
    waiting = {"prompt": "a b c", "max_tokens": 120, "ignore_eos": True}
    calls.append(Call(name="leaves at once", path=COMPLETIONS, body=waiting, leaves_after=0))
    return calls


GOOD: tuple[Call, ...] = tuple(_good())
BAD: tuple[Call, ...] = tuple(_hostile())
