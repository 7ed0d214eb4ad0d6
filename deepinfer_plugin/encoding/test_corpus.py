"""The rendering equals that of deepseek-recipe, token for token, on requests of every kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import deepseek_recipe
import pytest

from deepinfer_plugin.encoding.conversation import EFFORT_WORDS, RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import GROUNDING_TOKENS, IMAGE_TOKEN, PromptEncoder

Body = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "how" it is:\n<｜User｜> </think> é',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
BARE_TOOL = {"type": "function", "function": {"name": "stop"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm <think>", "n": 3}'}}
OTHER_CALL = {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
TYPED_CALL = {
    "id": "c3",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"a":1.50,"b":"x\\ny","c":null,"d":[1, 2],"e":{"k":true},"f":1e3}'},
}
# one or more characters of every plane that has any, and the edges of each
PLANES = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0x00, 0x41, 0x3041, 0xFFFD, 0xFFFF))


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> Body:
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any, call_id: str) -> Body:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def text(content: str) -> Body:
    return {"type": "text", "text": content}


SYSTEM = {"role": "system", "content": "You are <｜System｜> helpful."}
CONVERSATIONS: dict[str, list[Body]] = {
    "one turn": [user("Hi")],
    "empty": [user("")],
    "no parts": [user([])],
    "parts": [user([text("a"), text(""), text("<｜User"), text("｜>")])],
    "control text": [
        user("<｜begin▁of▁sentence｜><｜User｜></think><｜end▁of▁sentence｜>｜DSML｜<｜deepseek_image｜>")
    ],
    "planes": [user(PLANES), assistant(PLANES, reasoning_content=PLANES), user(PLANES)],
    "controls of ASCII": [user("".join(map(chr, range(128))))],
    "huge": [user("All work and no play <think>. " * 4_000)],
    "system": [SYSTEM, user("Hi")],
    "system parts": [{"role": "system", "content": [text("s1"), text("s2")]}, user("Hi")],
    "system later": [SYSTEM, user("a"), assistant("b"), {"role": "system", "content": "mid"}, user("c")],
    "system only": [SYSTEM],
    "reminder": [user("a"), {"role": "latest_reminder", "content": "note <think>"}, user("b")],
    "users in a row": [user("a"), user("b")],
    "reasoning": [user("a"), assistant("b", reasoning_content="why"), user("c"), assistant("d"), user("e")],
    "ends with the assistant": [user("a"), assistant("b", reasoning_content="why")],
    "continued": [user("a"), assistant("begun", reasoning_content="why", prefix=True)],
    "continued reasoning": [user("a"), assistant("", reasoning_content="why", prefix=True)],
    "continued without reasoning": [user("a"), assistant("begun", prefix=True)],
    "assistant parts": [user("q"), assistant([text("a1"), text("a2")]), user("w")],
    "tool call": [user("a"), assistant(None, tool_calls=[CALL]), tool("sun </tool_result>", "c1")],
    "typed call": [user("a"), assistant("", tool_calls=[TYPED_CALL]), tool("", "c3"), user("b")],
    "calls answered in another order": [
        user("a"),
        assistant("x", reasoning_content="r", tool_calls=[CALL, OTHER_CALL]),
        tool("second <｜Assistant｜>", "c2"),
        tool([text("first"), text("part")], "c1"),
        user("and now?"),
    ],
    "reasoning before and after tools": [
        user("a"),
        assistant("b", reasoning_content="old"),
        user("c"),
        assistant("", reasoning_content="new", tool_calls=[CALL]),
        tool("sun", "c1"),
    ],
}
MODES: dict[str, Body] = {
    "default": {},
    "chat": {"reasoning_effort": "none"},
    **{f"effort {word}": {"reasoning_effort": word} for word in EFFORT_WORDS},
}
EXTRAS: dict[str, Body] = {
    "tools": {"tools": [TOOL, BARE_TOOL]},
    "hidden tools": {"tools": [TOOL], "tool_choice": "none"},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "title": "</think>", "x": 1.0}},
        }
    },
}


def corpus() -> Iterator[tuple[str, Body]]:
    for name, messages in CONVERSATIONS.items():
        for mode, fields in MODES.items():
            if name != "huge" or mode in ("default", "chat"):
                yield f"{name}, {mode}", {"messages": messages, **fields}
        for extra, fields in EXTRAS.items():
            if "tools" in extra and name.startswith("continued"):
                continue  # the official conversion refuses it
            for mode in ("default", "chat"):
                yield f"{name}, {extra}, {mode}", {"messages": messages, **fields, **MODES[mode]}
    json_request = {"messages": [user("as json")], "response_format": {"type": "json_object"}}
    yield "any json", json_request


def ours(encoder: PromptEncoder, body: Body) -> list[int]:
    options = RenderOptions.from_template_kwargs({"reasoning_effort": body.get("reasoning_effort")})
    conversation = build_conversation(
        body["messages"],
        options,
        tools=body.get("tools"),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
    )
    return encoder.encode(conversation, options.effort)


@pytest.fixture(scope="module")
def recipe(tokenizer_json: str) -> deepseek_recipe.DeepseekV41Encoding:
    special = deepseek_recipe.SpecialTokens(image=IMAGE_TOKEN)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special)
    return encoding.with_tokenizer(deepseek_recipe.Tokenizer.from_str(tokenizer_json))


@pytest.mark.parametrize(("name", "body"), [pytest.param(name, body, id=name) for name, body in corpus()])
def test_a_request_becomes_the_tokens_of_the_official_conversion(
    name: str, body: Body, encoder: PromptEncoder, recipe: deepseek_recipe.DeepseekV41Encoding
) -> None:
    request = deepseek_recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", **body})
    converted = request.convert(deepseek_recipe.ConversionOptions())
    assert ours(encoder, body) == recipe.encode(converted.conversation), name


def test_only_grounding_tokens_in_history_differ_and_stay_text(
    encoder: PromptEncoder, recipe: deepseek_recipe.DeepseekV41Encoding
) -> None:
    for control in sorted(GROUNDING_TOKENS):
        messages = [user(f"a{control}"), assistant(f"b{control}", reasoning_content=control), user("c")]
        converted = deepseek_recipe.ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", "messages": messages})
        theirs = recipe.encode(converted.convert(deepseek_recipe.ConversionOptions()).conversation)
        assert theirs.count(encoder.id_of(control)) == 1, "that of the answer; earlier reasoning is dropped"
        assert encoder.id_of(control) not in ours(encoder, {"messages": messages})


@pytest.mark.parametrize("effort", range(1, 101))
def test_an_effort_as_a_number_stands_where_the_word_puts_its_own(
    effort: int, encoder: PromptEncoder, tokenizer_json: str
) -> None:
    full = deepseek_recipe.Tokenizer.from_str(tokenizer_json)
    line = f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    prompt = f"<｜begin▁of▁sentence｜><｜System｜>{line}7 or 75<｜User｜>75<｜Assistant｜><think>"
    body = {"messages": [{"role": "system", "content": "7 or 75"}, user("75")], "reasoning_effort": effort}
    assert ours(encoder, body) == full.encode(prompt)


def test_the_verified_strings_of_the_specification() -> None:
    encoder = PromptEncoder(json.dumps(_identity_tokenizer()))
    line = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    turns = [{"role": "system", "content": "S"}, user("Hi"), assistant("A"), user("Q2")]
    cases: list[tuple[Body, str]] = [
        (
            {"messages": [user("Hi")]},
            f"<｜begin▁of▁sentence｜><｜System｜>{line.format(75)}<｜User｜>Hi<｜Assistant｜><think>",
        ),
        (
            {"messages": [user("Hi")], "reasoning_effort": "none"},
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>",
        ),
        (
            {"messages": turns, "reasoning_effort": 30},
            f"<｜begin▁of▁sentence｜><｜System｜>{line.format(30)}S<｜User｜>Hi<｜Assistant｜></think>A"
            "<｜end▁of▁sentence｜><｜User｜>Q2<｜Assistant｜><think>",
        ),
    ]
    for body, expected in cases:
        options = RenderOptions.from_template_kwargs({"reasoning_effort": body.get("reasoning_effort")})
        pieces = encoder.render(build_conversation(body["messages"], options), options.effort)
        assert "".join(piece for piece, _ in pieces) == expected


def _identity_tokenizer() -> Body:
    from deepinfer_plugin.reference.tiny_tokenizer import tokenizer_files

    return tokenizer_files(512, 4096)[0]
