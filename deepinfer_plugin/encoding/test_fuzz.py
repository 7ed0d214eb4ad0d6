"""Random requests built to hijack the prompt: 2,000 in CI, 50,000 in night mode (``pytest --depth full``)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepinfer_plugin.encoding.conftest import full_tokenizer
from deepinfer_plugin.encoding.conversation import RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import PromptEncoder

Body = dict[str, Any]

PARTS = 10
CASES = {"quick": 2_000 // PARTS, "full": 50_000 // PARTS}
FIXED = "x"

_TOKENS = [token["content"] for token in full_tokenizer()["added_tokens"]]
_WRAPPERS = (
    "",
    " ",
    "\n\n",
    "<",
    ">",
    "</",
    "｜",
    "▁",
    "<｜",
    "｜>",
    "\u200b",
    "﻿",
    "\x00",
    "\ufe0f",
    "́",
    "<｜DSML｜ calls>",
)


def _fragments() -> st.SearchStrategy[str]:
    """Control tokens, pieces of them, what may stand around them, and any Unicode text."""
    whole = st.sampled_from(_TOKENS)
    cut = st.builds(
        lambda text, a, b: text[min(a, b) % len(text) :][: max(a, b)], whole, st.integers(0, 30), st.integers(0, 30)
    )
    doubled = st.builds(
        lambda text, at, other: text[: at % len(text)] + other + text[at % len(text) :],
        whole,
        st.integers(0, 30),
        whole,
    )
    return st.one_of(whole, cut, doubled, st.sampled_from(_WRAPPERS), st.text(max_size=6))


TEXT = st.lists(_fragments(), max_size=6).map("".join)
CONTENT = st.one_of(
    TEXT, st.lists(TEXT, min_size=1, max_size=4).map(lambda parts: [{"type": "text", "text": part} for part in parts])
)
CALL = st.builds(
    lambda name, key, value: {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({key: value}, ensure_ascii=False)},
    },
    TEXT,
    TEXT,
    st.one_of(TEXT, st.lists(TEXT, max_size=2), st.dictionaries(TEXT, TEXT, max_size=1)),
)
MESSAGE = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "system", "developer", "latest_reminder"]),
        CONTENT,
    ),
    st.builds(lambda content: {"role": "tool", "content": content, "tool_call_id": "c"}, CONTENT),
    st.builds(
        lambda content, reasoning, calls, prefix: {
            "role": "assistant",
            "content": content,
            "reasoning": reasoning,
            "tool_calls": calls,
            "prefix": prefix,
        },
        CONTENT,
        st.none() | TEXT,
        st.lists(CALL, max_size=2),
        st.booleans(),
    ),
)
TOOL = st.builds(
    lambda name, description, key, value: {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": {key: value}},
    },
    TEXT,
    TEXT,
    TEXT,
    TEXT,
)
BODY = st.fixed_dictionaries(
    {
        "messages": st.lists(MESSAGE, min_size=1, max_size=5),
        "tools": st.none() | st.lists(TOOL, min_size=1, max_size=2),
        "response_format": st.none()
        | TEXT.map(lambda t: {"type": "json_schema", "json_schema": {"schema": {"title": t}}}),
    }
)
KWARGS = st.fixed_dictionaries(
    {"thinking": st.booleans(), "reasoning_effort": st.sampled_from([None, "max", "none", 1, 30])}
)
_STRUCTURE = frozenset({"role", "type", "id", "tool_call_id"})


def harmless(value: Any, key: str = "") -> Any:
    """The same request with every text that is not empty replaced by one letter."""
    if isinstance(value, dict):
        return {name if name in _NAMES else harmless(name): harmless(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [harmless(item) for item in value]
    if key == "arguments":
        return json.dumps(harmless(json.loads(value)))
    if not isinstance(value, str) or key in _STRUCTURE or not value:
        return value
    return FIXED


_NAMES = frozenset(
    {
        *("messages", "role", "content", "type", "text", "tool_call_id", "reasoning", "tool_calls", "prefix", "id"),
        *("tools", "function", "name", "arguments", "description", "parameters"),
        *("response_format", "json_schema", "schema", "title"),
    }
)


def pieces_and_ids(encoder: PromptEncoder, body: Body, kwargs: Body) -> tuple[list[tuple[str, bool]], list[int]]:
    options = RenderOptions.from_template_kwargs(kwargs)
    conversation = build_conversation(
        body["messages"], options, tools=body["tools"], response_format=body["response_format"]
    )
    pieces = encoder.render(conversation, options.effort)
    return pieces, encoder.encode_pieces(pieces)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_text_never_becomes_a_control_token(
    part: int, encoder: PromptEncoder, tokenizer_json: str, request: pytest.FixtureRequest
) -> None:
    full = Tokenizer.from_str(tokenizer_json)
    examples = CASES[request.config.getoption("--depth")]
    seen = {"cases": 0, "spelled": 0}

    @seed(part)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(body=BODY, kwargs=KWARGS)
    def check(body: Body, kwargs: Body) -> None:
        pieces, ids = pieces_and_ids(encoder, body, kwargs)
        wanted, _ = pieces_and_ids(encoder, harmless(body), kwargs)
        controls = [text for text, is_control in pieces if is_control]
        assert controls == [text for text, is_control in wanted if is_control]
        assert [encoder.id_of(text) for text in controls] == [token for token in ids if token in encoder.added_ids]
        assert full.decode(ids, skip_special_tokens=False) == "".join(text for text, _ in pieces), "no text is lost"
        seen["cases"] += 1
        seen["spelled"] += any(token in text for text, is_control in pieces if not is_control for token in _TOKENS)

    check()
    assert seen["cases"] >= examples
    assert seen["spelled"] > examples // 4, "most requests spell no token: the fuzz is too weak"
