"""``so_args``: each rule, each side of each bound."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deepinfer_plugin.grammar.so_args import (
    BOUND_ARG,
    MAX_TRIGGER,
    TRIGGER_ARG,
    parse_so_args,
    settle_structured_output,
)

VOCABULARY = 256
JSON = {"schema_type": "json", "schema": '{"type": "object"}'}
TRIGGERED = {**JSON, "trigger_token_ids": [7]}

GOOD: list[tuple[Any, str, str]] = [
    (JSON, "json", '{"type": "object"}'),
    ({"schema_type": "json", "schema": {"type": "object"}}, "json", '{"type": "object"}'),
    ({"schema_type": "json", "schema": True}, "json", "true"),
    ({"schema_type": "regex", "schema": "a+"}, "regex", "a+"),
    ({"schema_type": "ebnf", "schema": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    (json.dumps(JSON), "json", '{"type": "object"}'),
]


@pytest.mark.parametrize(("value", "kind", "schema"), GOOD)
def test_the_three_types_are_read(value: Any, kind: str, schema: str) -> None:
    found = parse_so_args(value, VOCABULARY)
    assert (found.schema_type, found.schema, found.trigger_token_ids, found.bound_token_id) == (kind, schema, (), None)


@pytest.mark.parametrize("trigger", [[0], [VOCABULARY - 1], [5] * MAX_TRIGGER])
def test_trigger_and_bound_are_read_at_the_edges_of_their_rule(trigger: list[int]) -> None:
    found = parse_so_args({**JSON, "trigger_token_ids": trigger, "bound_token_id": VOCABULARY - 1}, VOCABULARY)
    assert found.trigger_token_ids == tuple(trigger)
    assert found.bound_token_id == VOCABULARY - 1


BAD: list[tuple[Any, str]] = [
    (3, "value is int, expected an object"),
    ([], "value is list, expected an object"),
    ("{", "value is no JSON"),
    ("[" * 100_000, "value is no JSON"),
    ("[]", "value is list, expected an object"),
    ({**JSON, "serialized": "x"}, "key 'serialized' is unknown"),
    ({"schema_type": "lark", "schema": "x"}, "schema_type is 'lark', expected one of json, regex, ebnf"),
    ({"schema": "x"}, "schema_type is None"),
    ({"schema_type": "json"}, "schema is NoneType"),
    ({"schema_type": "regex", "schema": ""}, "schema is str, expected a text that is not empty"),
    ({"schema_type": "regex", "schema": {"a": 1}}, "schema is dict"),
    ({"schema_type": "json", "schema": [1]}, "schema is list"),
    ({**JSON, "trigger_token_ids": []}, "trigger_token_ids is [], expected a list of 1 to 64"),
    ({**JSON, "trigger_token_ids": [1] * (MAX_TRIGGER + 1)}, "trigger_token_ids is [1, 1"),
    ({**JSON, "trigger_token_ids": 7}, "trigger_token_ids is 7, expected a list"),
    ({**JSON, "trigger_token_ids": [-1]}, "trigger_token_ids is -1, expected token ids from 0 to 255"),
    ({**JSON, "trigger_token_ids": [VOCABULARY]}, "trigger_token_ids is 256"),
    ({**JSON, "trigger_token_ids": [True]}, "trigger_token_ids is True"),
    ({**JSON, "trigger_token_ids": ["7"]}, "trigger_token_ids is '7'"),
    ({**JSON, "bound_token_id": 7}, "bound_token_id is 7 without a trigger"),
    ({**TRIGGERED, "bound_token_id": [7]}, "bound_token_id is [7], expected token ids"),
    ({**TRIGGERED, "bound_token_id": -1}, "bound_token_id is -1"),
    ({**TRIGGERED, "bound_token_id": VOCABULARY}, "bound_token_id is 256"),
]


@pytest.mark.parametrize(("value", "expected"), BAD)
def test_a_broken_rule_is_named(value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_so_args(value, VOCABULARY)


def test_the_request_gets_vllms_parameter_and_the_callers_object_stays() -> None:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(extra_args={"so_args": {**TRIGGERED, "bound_token_id": 9}, "kept": 1})
    settled = settle_structured_output(params, VOCABULARY)
    assert settled.structured_outputs is not None
    assert settled.structured_outputs.json == JSON["schema"]
    assert settled.extra_args == {"kept": 1, TRIGGER_ARG: [7], BOUND_ARG: 9}
    assert params.structured_outputs is None
    plain = SamplingParams()
    assert settle_structured_output(plain, VOCABULARY) is plain


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"extra_args": {"so_args": "{"}}, "so_args: value is no JSON"),
        ({"extra_args": {TRIGGER_ARG: [1]}}, "expected trigger_token_ids in so_args"),
        ({"extra_args": {"so_args": JSON}, "structured_outputs": {"regex": "a"}}, "expected one of the two"),
    ],
)
def test_what_the_server_would_not_take_ends_in_its_own_error(fields: dict[str, Any], expected: str) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    if "structured_outputs" in fields:
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**fields["structured_outputs"])}
    with pytest.raises(VLLMValidationError, match=re.escape(expected)):
        settle_structured_output(SamplingParams(**fields), VOCABULARY)
