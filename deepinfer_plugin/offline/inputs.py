"""The prompts of ``offline``: JSON lines, or one prompt a line. Every line is checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_plugin.line_input import json_object, read_lines

PROMPT_FIELDS = ("prompt", "messages")
CHAT_FIELDS = ("tools", "chat_template_kwargs")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
FIELDS = ("id", *PROMPT_FIELDS, *CHAT_FIELDS, *SAMPLING_FIELDS)
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: raw ``text``, or the ``messages`` of a chat. ``sampling`` is what the line sets itself."""

    name: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    chat: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(path: Path, *, is_chat: bool) -> list[Prompt]:
    """Read and check every line.

    Args:
        path: ``*.jsonl`` holds JSON objects, any other file one prompt a line; empty lines are skipped. A line without
            an id is called ``line-N``.
        is_chat: whether a plain line, and ``prompt`` of a JSON line, is the message of a user or raw text.

    Raises:
        InputError: the file cannot be read, or a line breaks a rule; the text starts with file:line.
    """

    def parse(line: str, number: int) -> Prompt:
        is_object = path.suffix == ".jsonl"
        value = json_object(line, FIELDS, "prompt or messages") if is_object else {"prompt": line.removesuffix("\r")}
        return _prompt(value, f"line-{number}", is_chat=is_chat)

    return read_lines(path, parse, "prompt")


def _prompt(value: dict[str, Any], default_name: str, *, is_chat: bool) -> Prompt:
    name = value.get("id", default_name)
    if not isinstance(name, str) or not name:
        raise ValueError(f"id is {name!r}, expected a non-empty string")
    if sum(key in value for key in PROMPT_FIELDS) != 1:
        raise ValueError("the line has not one of prompt and messages, expected one of the two")
    text, messages = value.get("prompt"), value.get("messages")
    if "prompt" in value and (not isinstance(text, str) or not text):
        raise ValueError(f"prompt is {text!r}, expected a non-empty string")
    if "messages" in value:
        _check_messages(messages)
    elif is_chat:
        text, messages = None, [{"role": "user", "content": text}]
    chat = {key: value[key] for key in CHAT_FIELDS if key in value}
    if text is not None and chat:
        raise ValueError(f"{next(iter(chat))} is set beside a raw prompt, expected it with messages only")
    sampling = {key: value[key] for key in SAMPLING_FIELDS if key in value}
    check_sampling(sampling)
    return Prompt(name=name, text=text, messages=tuple(messages or ()), chat=chat, sampling=sampling)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is empty or no list, expected a list of {role, content}")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"messages[{position}] has no role, expected one of {', '.join(ROLES)}")


def check_sampling(values: Mapping[str, Any]) -> None:
    """Check sampling parameters, those of a line and those of the command line.

    Raises:
        ValueError: one is outside its rule.
    """
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        is_integer = is_number and isinstance(value, int)
        rule, is_right = {
            "temperature": ("a number from 0 to 2", is_number and 0 <= value <= 2),
            "top_p": ("a number above 0, up to 1", is_number and 0 < value <= 1),
            "top_k": ("an integer, -1 (all) or 1 and more", is_integer and (value == -1 or value >= 1)),
            "max_tokens": ("an integer, 1 or more", is_integer and value >= 1),
            "seed": ("an integer from -2^63 to 2^63 - 1", is_integer and -(1 << 63) <= value < 1 << 63),
        }[key]
        if not is_right:
            raise ValueError(f"{key} is {value!r}, expected {rule}")
