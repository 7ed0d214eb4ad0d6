"""Prompt files: what a line may hold, on both sides of every rule, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.offline.inputs import Prompt, read_prompts


def read(tmp_path: Path, *lines: Any, is_chat: bool = True) -> list[Prompt]:
    path = tmp_path / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_prompts(path, is_chat=is_chat)


def test_a_plain_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes('first\r\n\n  \nzweite Zeile \u2028 weiter\n{"prompt": 1}'.encode())
    names = ["line-1", "line-4", "line-5"]
    texts = ["first", "zweite Zeile \u2028 weiter", '{"prompt": 1}']
    raw = read_prompts(path, is_chat=False)
    assert [(prompt.name, prompt.text, prompt.messages) for prompt in raw] == [
        (name, text, ()) for name, text in zip(names, texts, strict=True)
    ]
    chat = read_prompts(path, is_chat=True)
    assert [prompt.messages for prompt in chat] == [({"role": "user", "content": text},) for text in texts]
    assert all(prompt.text is None for prompt in chat)


def test_a_json_line_may_set_its_own_parameters(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    first, second = read(
        tmp_path,
        {"id": "a", "prompt": "x", "temperature": 0, "max_tokens": 1, "top_k": -1, "top_p": 1, "seed": -(1 << 63)},
        {"messages": messages, "tools": tools},
        is_chat=False,
    )
    assert (first.name, first.text) == ("a", "x")
    assert first.sampling == {"temperature": 0, "max_tokens": 1, "top_k": -1, "top_p": 1, "seed": -(1 << 63)}
    assert (second.name, second.messages, second.chat) == ("line-2", tuple(messages), {"tools": tools})


GOOD: tuple[tuple[str, Any], ...] = (
    ("temperature", 2),
    ("top_p", 0.001),
    ("top_k", 1),
    ("max_tokens", 1),
    ("seed", (1 << 63) - 1),
)


@pytest.mark.parametrize(("key", "value"), GOOD)
def test_a_parameter_inside_its_bound_is_read(tmp_path: Path, key: str, value: Any) -> None:
    assert read(tmp_path, {"prompt": "x", key: value})[0].sampling == {key: value}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, "1", True, None)),
        *(("top_p", value) for value in (0, 1.1, -1)),
        *(("top_k", value) for value in (0, -2, 1.0)),
        *(("max_tokens", value) for value in (0, -1, 1.0, True)),
        *(("seed", value) for value in (1 << 63, -(1 << 63) - 1, 0.5)),
    ],
)
def test_a_parameter_outside_its_bound_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"in.jsonl:2: {key} is .*, expected "):
        read(tmp_path, {"prompt": "x"}, {"prompt": "x", key: value})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ("[1]", "is a JSON list"),
        ({}, "not one of prompt and messages"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "not one of prompt and messages"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": 5}, "prompt is 5"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "root", "content": "x"}]}, r"messages\[0\] has no role"),
        ({"prompt": "a", "id": ""}, "id is ''"),
        ({"prompt": "a", "id": 7}, "id is 7"),
        ({"prompt": "a", "max_token": 7}, "field 'max_token' is unknown"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, text: str) -> None:
    with pytest.raises(InputError, match=rf"in.jsonl:1: .*{text}"):
        read(tmp_path, line)


def test_tools_beside_a_raw_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tools is set beside a raw prompt"):
        read(tmp_path, {"prompt": "a", "tools": []}, is_chat=False)


def test_an_id_is_used_once_and_a_file_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"in.jsonl:3: id 'a' is also on line 1"):
        read(tmp_path, {"id": "a", "prompt": "x"}, "", {"id": "a", "prompt": "y"})
    with pytest.raises(InputError, match="holds no prompt"):
        read(tmp_path, "", " ")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none", is_chat=True)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "bytes", is_chat=True)
