"""No text of a request becomes a control token: every added token, every field, every split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from deepinfer_plugin.encoding.conversation import RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import PromptEncoder, without_added_tokens
from deepinfer_plugin.errors import CheckpointError, PromptError

Body = dict[str, Any]
FIELDS = (
    "user",
    "system",
    "developer",
    "reminder",
    "reasoning",
    "answer",
    "tool result",
    "tool name",
    "tool description",
    "tool schema",
    "call name",
    "call key",
    "call value",
    "call number",
    "broken call",
    "response schema",
)
OPTIONS = RenderOptions()


def request_with(texts: dict[str, str]) -> Body:
    """A conversation with every kind of field; ``texts`` fills some of them."""

    def get(field: str) -> str:
        return texts.get(field, "x")

    arguments = json.dumps({get("call key"): get("call value"), "deep": [get("call number")]})
    calls = [
        {"id": "1", "type": "function", "function": {"name": get("call name"), "arguments": arguments}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": f"[{get('broken call')}"}},
    ]
    function = {
        "name": get("tool name"),
        "description": get("tool description"),
        "parameters": {"properties": {get("tool schema"): {"enum": [get("tool schema")]}}},
    }
    schema = {"title": get("response schema")}
    return {
        "messages": [
            {"role": "system", "content": get("system")},
            {"role": "developer", "content": get("developer")},
            {"role": "user", "content": get("user")},
            {"role": "assistant", "content": get("answer"), "reasoning": get("reasoning"), "tool_calls": calls},
            {"role": "tool", "content": get("tool result"), "tool_call_id": "1"},
            {"role": "latest_reminder", "content": get("reminder")},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }


def encode(encoder: PromptEncoder, body: Body) -> list[int]:
    return encoder.encode(
        build_conversation(body["messages"], OPTIONS, **{k: v for k, v in body.items() if k != "messages"})
    )


def controls(encoder: PromptEncoder, ids: list[int]) -> list[int]:
    return [token for token in ids if token in encoder.added_ids]


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_turns_a_spelled_token_into_the_token(
    field: str, encoder: PromptEncoder, added_tokens: dict[str, int]
) -> None:
    wanted = controls(encoder, encode(encoder, request_with({})))
    assert len(wanted) > 20
    for text in added_tokens:
        for spelled in (text, f" {text} ", text * 3, f"a{text}b\n\n{text}"):
            ids = encode(encoder, request_with({field: spelled}))
            assert controls(encoder, ids) == wanted, (field, spelled)


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_no_split_over_parts_becomes_a_token(role: str, encoder: PromptEncoder, added_tokens: dict[str, int]) -> None:
    def ids_of(parts: list[str]) -> list[int]:
        content = [{"type": "text", "text": part} for part in parts]
        return encode(encoder, {"messages": [{"role": "user", "content": "q"}, {"role": role, "content": content}]})

    wanted = controls(encoder, ids_of(["x", "y"]))
    for text in added_tokens:
        for cut in range(len(text) + 1):
            assert controls(encoder, ids_of([text[:cut], text[cut:]])) == wanted, (text, cut)
        assert controls(encoder, ids_of(list(text))) == wanted, text


def test_no_split_over_messages_or_template_text_becomes_a_token(
    encoder: PromptEncoder, added_tokens: dict[str, int]
) -> None:
    def ids_of(first: str, second: str) -> list[int]:
        return encode(encoder, {"messages": [{"role": "user", "content": first}, {"role": "user", "content": second}]})

    wanted = controls(encoder, ids_of("x", "y"))
    for text in added_tokens:
        for cut in range(1, len(text)):
            assert controls(encoder, ids_of(text[:cut], text[cut:])) == wanted, (text, cut)


def test_the_check_notices_a_tokenizer_that_keeps_its_added_tokens(
    tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = PromptEncoder(tokenizer_json)
    wanted = controls(encoder, encode(encoder, request_with({})))
    monkeypatch.setattr(encoder, "_plain", Tokenizer.from_str(tokenizer_json))
    assert controls(encoder, encode(encoder, request_with({"user": "<｜Assistant｜>"}))) != wanted


def test_merges_that_spell_an_added_token_are_taken_out(tokenizer_json: str, added_tokens: dict[str, int]) -> None:
    content = json.loads(tokenizer_json)
    content["pre_tokenizer"] = {**content["pre_tokenizer"], "use_regex": False}  # a text is merged as a whole
    kept = Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
    assert added_tokens["<think>"] in kept.encode("<think>").ids, "the hazard is there"
    plain = Tokenizer.from_str(json.dumps(without_added_tokens(content)))
    assert plain.encode("<think>").tokens == ["<think", ">"]
    assert plain.decode(plain.encode("<think> x").ids) == "<think> x"


def test_a_tokenizer_of_another_kind_is_refused(tokenizer_json: str) -> None:
    content = json.loads(tokenizer_json)
    content["model"]["unk_token"] = "<｜▁pad▁｜>"
    with pytest.raises(CheckpointError, match="expected BPE without one"):
        without_added_tokens(content)


def test_a_missing_control_token_is_named(tokenizer_json: str) -> None:
    content = json.loads(tokenizer_json)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<｜System｜>"]
    with pytest.raises(PromptError, match="no token '<｜System｜>'"):
        encode(PromptEncoder(json.dumps(content)), request_with({}))


BAD: dict[str, tuple[Body, str]] = {
    "no messages": ({"messages": []}, "messages is empty"),
    "role": ({"messages": [{"role": "root", "content": "x"}]}, r"messages\[0\].role is 'root'"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        r"messages\[0\].content\[0\] is an image, expected no image in a request",
    ),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "is of type 'input_audio'"),
    "text of a part": ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "with the text 3"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content is 7, expected a list"),
    "surrogate": ({"messages": [{"role": "user", "content": "a\ud800"}]}, "lone surrogate 0xd800"),
    "tool": ({"messages": [{"role": "user", "content": ""}], "tools": [{"type": "x"}]}, r"tools\[0\] is"),
    "tool schema": (
        {
            "messages": [{"role": "user", "content": ""}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": float("nan")}}}],
        },
        r"tools\[0\].function.parameters is no JSON",
    ),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, r"tool_calls\[0\] is"),
    "call id": ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "tool_call_id is 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_ends_in_one_error_that_names_its_place(name: str, encoder: PromptEncoder) -> None:
    body, expected = BAD[name]
    with pytest.raises(PromptError, match=expected):
        encode(encoder, body)


@pytest.mark.parametrize("effort", [0, 101, -1, True, 30.0, "30", "HIGH", "", [50]])
def test_an_effort_outside_its_rule_is_refused(effort: object) -> None:
    with pytest.raises(PromptError, match="expected none, minimal, low"):
        RenderOptions.from_template_kwargs({"reasoning_effort": effort})


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, RenderOptions()),
        ({"thinking": False}, RenderOptions(thinking=False)),
        ({"enable_thinking": False, "thinking": True}, RenderOptions()),
        ({"reasoning_effort": "none", "enable_thinking": True}, RenderOptions(thinking=False)),
        ({"reasoning_effort": 1}, RenderOptions(effort=1)),
        ({"reasoning_effort": 100, "documents": None}, RenderOptions(effort=100)),
        ({"continue_final_message": True, "add_generation_prompt": False}, RenderOptions(continue_final_message=True)),
    ],
)
def test_template_arguments_mean_what_they_mean_in_vllm(kwargs: Body, expected: RenderOptions) -> None:
    assert RenderOptions.from_template_kwargs(kwargs) == expected


@pytest.mark.parametrize("kwargs", [{"drop_thinking": False}, {"add_generation_prompt": False}])
def test_what_the_released_format_cannot_show_is_refused(kwargs: Body) -> None:
    with pytest.raises(PromptError, match="the released"):
        RenderOptions.from_template_kwargs(kwargs)


def test_only_the_assistant_can_be_continued(encoder: PromptEncoder) -> None:
    options = RenderOptions(continue_final_message=True)
    with pytest.raises(PromptError, match="expected assistant"):
        build_conversation([{"role": "user", "content": "x"}], options)
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]
    text = "".join(piece for piece, _ in encoder.render(build_conversation(begun, options)))
    assert text.endswith("<｜Assistant｜><think></think>Once")
