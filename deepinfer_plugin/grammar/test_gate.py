"""The gate: good constraints pass, hostile ones end in one error within the limit, and nothing is left behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from deepinfer_plugin.grammar import gate as gate_module
from deepinfer_plugin.grammar.gate import MAX_TEXT_BYTES, GrammarError, GrammarGate, constraint_of
from deepinfer_plugin.grammar.hostile import HOSTILE

GOOD = {
    "json": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    "regex": "[a-z]+@[a-z]+",
    "grammar": 'root ::= "a" root | "b"',
    "structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}),
}


def describe() -> str:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [chr(97 + i) for i in range(26)] + ["{", "}", '"', ":", " ", "@", "</s>"], stop_token_ids=[32]
    )
    return str(info.serialize_json())


@pytest.fixture(scope="module")
def gate() -> Iterator[GrammarGate]:
    tested = GrammarGate(describe, timeout_s=8.0)
    yield tested
    tested.close()


def pid(tested: GrammarGate) -> int:
    assert tested._process is not None
    return tested._process.pid


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_constraint_passes_and_is_remembered(
    kind: str, gate: GrammarGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.check(kind, GOOD[kind])

    def fail(*_: object) -> str:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(gate, "_compile", fail)
    gate.check(kind, GOOD[kind])


def admit(gate: GrammarGate, kind: str, text: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    constraint = constraint_of(StructuredOutputsParams(**{kind: text}))
    assert constraint is not None
    gate.check(*constraint)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_and_the_next_one_passes(name: str, gate: GrammarGate) -> None:
    from vllm.exceptions import VLLMValidationError

    expected = r"structured output: the .*(expected|does not compile)|nested too deeply"
    with pytest.raises((GrammarError, VLLMValidationError), match=expected):
        admit(gate, *HOSTILE[name])
    admit(gate, "regex", f"after {name.replace(' ', '_')}")


def test_a_compiler_that_hangs_is_ended_at_the_limit_and_replaced(gate: GrammarGate) -> None:
    gate.check("regex", "warm")
    first = pid(gate)
    tested = GrammarGate(describe, timeout_s=0.05)
    try:
        with pytest.raises(GrammarError, match=r"not within 0\.05 s"):
            tested.check(*HOSTILE["enum of 80,000"])
        assert tested._process is None
    finally:
        tested.close()
    assert pid(gate) == first


def test_a_compiler_that_dies_costs_one_constraint(gate: GrammarGate) -> None:
    gate.check("regex", "alive")
    os.kill(pid(gate), 9)
    time.sleep(0.2)
    gate.check("regex", "and again")


def test_a_text_at_the_limit_is_compiled_and_one_byte_more_is_not(
    gate: GrammarGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(gate, "_compile", lambda kind, text: asked.append(len(text)))
    gate.check("regex", "a" * MAX_TEXT_BYTES)
    with pytest.raises(GrammarError, match=f"has {MAX_TEXT_BYTES + 1} bytes, expected at most {MAX_TEXT_BYTES}"):
        gate.check("regex", "a" * (MAX_TEXT_BYTES + 1))
    assert asked == [MAX_TEXT_BYTES]


def test_only_so_many_constraints_are_remembered(gate: GrammarGate, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gate, "_compile", lambda kind, text: asked.append(text))
    monkeypatch.setattr(gate_module, "MAX_REMEMBERED", len(gate._passed) + 2)
    for text in ("one", "two", "three", "one", "three"):
        gate.check("regex", text)
    assert asked[:3] == ["one", "two", "three"]
    assert "three" not in asked[3:]


def test_closing_ends_the_child() -> None:
    tested = GrammarGate(describe, timeout_s=20.0)
    tested.check("regex", "a")
    child = pid(tested)
    tested.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
