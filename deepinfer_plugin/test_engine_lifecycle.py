"""What users of vLLM expect of a request, on our model: sampling options, stops, aborts, n, structured output.

One engine in one child runs every request; what a sampling option must do is computed here from the raw logits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin import envs
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RequestResult, RunResult, run_engines
from deepinfer_plugin.reference.golden import lowest_argmax
from deepinfer_plugin.reference.tiny_config import config_dict
from deepinfer_plugin.reference.tiny_tokenizer import tokenizer_files
from deepinfer_plugin.settings import Arithmetic

VOCAB_SIZE = int(config_dict("nano")["text_config"]["vocab_size"])
VOCABULARY: dict[str, int] = tokenizer_files(VOCAB_SIZE, 64)[0]["model"]["vocab"]
A, B, C, EOS = VOCABULARY["a"], VOCABULARY["b"], VOCABULARY["c"], 1
PROMPT = tuple(range(20, 55))
NUM_OUTPUT = 8
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "sum " digit "+" digit\ndigit ::= [0-9]'
FLAGS = (
    "--block-size=32",
    "--max-num-seqs=64",
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)


def _request(name: str, /, max_tokens: int = NUM_OUTPUT, forced: tuple[int, ...] = (), **sampling: Any) -> Request:
    return Request(name=name, tokens=PROMPT, max_tokens=max_tokens, forced=forced, sampling=sampling)


def _sampled() -> list[Request]:
    warm: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    return [
        _request("greedy"),
        _request("seed 11", **warm),
        _request("seed 11 again", **warm),
        _request("seed 12", temperature=1.0, seed=12),
        _request("hot", temperature=2.0, seed=12),
        _request("cold", temperature=0.01, seed=12),
        _request("two", n=2, **warm),
        _request("top_k", top_k=3, **warm),
        _request("top_k 1", top_k=1, **warm),
        _request("top_p", top_p=0.5, **warm),
        _request("min_p", min_p=0.3, **warm),
        _request("all three", top_k=20, top_p=0.9, min_p=0.01, **warm),
        _request("penalties", repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        _request("bias", logit_bias={A: 100.0}),
        _request("negative bias", logit_bias=dict.fromkeys(range(100), -100.0)),
        _request("bad words", bad_words=["a"], logit_bias={A: 100.0, B: 50.0}),
        _request("allowed", allowed_token_ids=[A, B, C], **warm),
        _request("end", ignore_eos=False, logit_bias={EOS: 100.0}),
        _request("min_tokens", ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=5),
    ]


def _stopped() -> list[Request]:
    text = (A, B, C, A, B)
    return [
        _request("stop string", forced=text, stop=["ca"]),
        _request("stop string kept", forced=text, stop=["ca"], include_stop_str_in_output=True),
        _request("stop token", forced=text, stop_token_ids=[C]),
        _request("length", forced=text),
    ]


def _structured() -> list[Request]:
    def constrained(name: str, **rule: Any) -> Request:
        return _request(name, 64, ignore_eos=False, temperature=1.0, seed=5, structured_outputs=rule)

    return [
        constrained("json", json=SCHEMA),
        constrained("regex", regex=r"[a-c]{2,4}-[0-9]{3}"),
        constrained("choice", choice=["left", "right"]),
        constrained("grammar", grammar=GRAMMAR),
    ]


def _actions() -> tuple[Action, ...]:
    other = tuple(range(60, 100))
    refused = [
        Request(name="refused token", tokens=(5, VOCAB_SIZE + 7)),
        Request(name="refused length", tokens=(5,) * 600),
        Request(name="refused top_p", tokens=(5,), sampling={"top_p": 1.5}),
        Request(name="refused force", tokens=(5,), sampling={"extra_args": {"golden_token_ids": "a"}}),
    ]
    kept = Request(name="kept", tokens=PROMPT, max_tokens=NUM_OUTPUT)
    dropped = Request(name="dropped", tokens=other, max_tokens=40)
    return (
        Action(add=tuple(_sampled())),
        Action(add=(*_stopped(), *_structured(), *refused)),
        Action(add=(Request(name="forced", tokens=PROMPT[:5], forced=PROMPT[5:]),)),
        Action(add=(Request(name="prompt rows", tokens=PROMPT, prompt_rows=True),)),
        Action(
            add=(dropped, kept, Request(name="dropped two", tokens=other, max_tokens=40, sampling={"n": 2})), steps=3
        ),
        Action(abort=("dropped", "dropped two"), steps=1),
        Action(add=(Request(name="dropped at once", tokens=other),), steps=0),
        Action(abort=("dropped at once",)),
        Action(add=(Request(name="after", tokens=PROMPT, max_tokens=NUM_OUTPUT),)),
    )


@pytest.fixture(scope="module")
def run(checkpoint: CheckpointFixture) -> RunResult:
    """The one engine, after all requests."""
    model = str(checkpoint("nano", 0))
    plan = EngineRun(name="nano", model=model, arithmetic=Arithmetic.REF, flags=FLAGS, actions=_actions())
    return run_engines([plan])["nano"]


def _tokens(run: RunResult, name: str) -> torch.Tensor:
    (tokens,) = run.requests[name].tokens
    return tokens


def _logits(run: RunResult, name: str) -> torch.Tensor:
    (logits,) = run.requests[name].logits
    return logits


def _text(result: RequestResult) -> str:
    return result.facts.outputs[0].text


def test_greedy_takes_the_largest_logit(run: RunResult) -> None:
    assert torch.equal(_tokens(run, "greedy"), lowest_argmax(_logits(run, "greedy")))
    assert len(_tokens(run, "greedy")) == NUM_OUTPUT


def test_a_seed_fixes_the_tokens(run: RunResult) -> None:
    assert torch.equal(_tokens(run, "seed 11"), _tokens(run, "seed 11 again"))
    assert not torch.equal(_tokens(run, "seed 11"), _tokens(run, "seed 12"))


def test_temperature_moves_draws_between_greedy_and_even(run: RunResult) -> None:
    assert torch.equal(_tokens(run, "cold"), _tokens(run, "greedy"))
    assert not torch.equal(_tokens(run, "seed 12"), _tokens(run, "greedy"))
    assert not torch.equal(_tokens(run, "seed 12"), _tokens(run, "hot"))


def test_n_gives_different_completions_of_one_prompt(run: RunResult) -> None:
    first, second = run.requests["two"].tokens
    assert len(first) == len(second) == NUM_OUTPUT
    assert not torch.equal(first, second)
    rows = [logits[0] for logits in run.requests["two"].logits]
    assert_bitwise_equal(rows[0], rows[1], "first row of both completions")


@pytest.mark.parametrize(("name", "top_k", "top_p", "min_p"), [
    ("top_k", 3, 1.0, 0.0),
    ("top_k 1", 1, 1.0, 0.0),
    ("top_p", VOCAB_SIZE, 0.5, 0.0),
    ("min_p", VOCAB_SIZE, 1.0, 0.3),
    ("all three", 20, 0.9, 0.01),
])  # fmt: skip
def test_a_draw_stays_inside_its_limits(name: str, top_k: int, top_p: float, min_p: float, run: RunResult) -> None:
    chances = _logits(run, name).double().softmax(dim=-1)
    tokens = _tokens(run, name)
    chosen = chances.gather(1, tokens[:, None])
    is_more_likely = chances > chosen
    assert int(is_more_likely.sum(dim=1).max()) < top_k
    assert float((chances * is_more_likely).sum(dim=1).max()) < top_p
    assert bool((chosen[:, 0] >= min_p * chances.amax(dim=1)).all())


def test_penalties_move_the_argmax_as_vllm_defines_them(run: RunResult) -> None:
    tokens = _tokens(run, "penalties").tolist()
    for step, logits in enumerate(_logits(run, "penalties")):
        row = logits.clone()
        seen = sorted({*PROMPT, *tokens[:step]})
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        for token in set(tokens[:step]):
            row[token] -= 0.2 * tokens[:step].count(token) + 0.4
        assert int(row.argmax()) == tokens[step], f"output token {step}"


def test_logit_bias_bad_words_and_allowed_tokens_act(run: RunResult) -> None:
    assert set(_tokens(run, "bias").tolist()) == {A}
    assert min(_tokens(run, "negative bias").tolist()) >= 100
    assert set(_tokens(run, "bad words").tolist()) == {B}
    assert set(_tokens(run, "allowed").tolist()) <= {A, B, C}


def test_the_end_token_ends_a_request_but_not_before_min_tokens(run: RunResult) -> None:
    assert _tokens(run, "end").tolist() == [EOS]
    assert run.requests["end"].facts.outputs[0].finish_reason == "stop"
    tokens = _tokens(run, "min_tokens").tolist()
    assert len(tokens) == 6
    assert tokens[-1] == EOS
    assert EOS not in tokens[:-1]


def test_stop_strings_and_stop_tokens_end_a_request(run: RunResult) -> None:
    facts = {name: run.requests[name].facts.outputs[0] for name in ("stop string", "stop token", "length")}
    assert _text(run.requests["stop string"]) == "ab"
    assert _text(run.requests["stop string kept"]) == "abca"
    assert (facts["stop string"].finish_reason, facts["stop string"].stop_reason) == ("stop", "ca")
    assert _tokens(run, "stop token").tolist() == [A, B, C]
    assert (facts["stop token"].finish_reason, facts["stop token"].stop_reason) == ("stop", C)
    assert facts["length"].finish_reason == "length"
    assert len(_tokens(run, "length")) == NUM_OUTPUT


def test_rows_of_a_prompt_are_those_of_the_same_tokens_forced_one_at_a_time(run: RunResult) -> None:
    prompt_logits = run.requests["prompt rows"].prompt_logits
    assert prompt_logits is not None
    assert prompt_logits.shape == (len(PROMPT) - 1, VOCAB_SIZE)
    assert _tokens(run, "forced")[:-1].tolist() == list(PROMPT[5:])
    assert_bitwise_equal(_logits(run, "forced")[:-1], prompt_logits[4:], "prompt rows")
    assert_bitwise_equal(_logits(run, "forced")[-1:], _logits(run, "prompt rows"), "row of the last prompt token")


def test_structured_output_keeps_its_form(run: RunResult) -> None:
    value = json.loads(_text(run.requests["json"]))
    assert sorted(value) == ["a", "b"]
    assert value["a"] in ("x", "yes")
    assert isinstance(value["b"], bool)
    assert re.fullmatch(r"[a-c]{2,4}-[0-9]{3}", _text(run.requests["regex"]))
    assert _text(run.requests["choice"]) in ("left", "right")
    assert re.fullmatch(r"sum [0-9]\+[0-9]", _text(run.requests["grammar"]))


def test_an_abort_frees_everything_and_moves_no_bit_of_the_others(run: RunResult) -> None:
    for name in ("dropped", "dropped two", "dropped at once"):
        assert not run.requests[name].facts.finished, name
    assert 0 < len(_tokens(run, "dropped")) < 40
    for name in ("kept", "after"):
        assert torch.equal(_tokens(run, name), _tokens(run, "greedy"))
        assert_bitwise_equal(_logits(run, name), _logits(run, "greedy"), name)
    assert run.facts.num_unfinished == 0
    assert run.facts.kv_usage == 0.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("refused token", "out of vocabulary"),
        ("refused length", "512"),
        ("refused top_p", "top_p"),
        ("refused force", "golden_token_ids"),
    ],
)
def test_a_bad_request_is_refused_with_a_reason(name: str, text: str, run: RunResult) -> None:
    error = run.requests[name].facts.error
    assert error is not None
    assert text in error


PARSERS = """
import json, sys
from deepinfer_plugin.platforms.detect import platform_class
platform_class()
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager
tokenizer = get_tokenizer(sys.argv[1], tokenizer_mode="deepseek_v41")
question = [{"role": "user", "content": "hi"}]
prompt = tokenizer.apply_chat_template(question, tokenize=False)
parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
request = ChatCompletionRequest(model="m", messages=question, tools=[tool])
parser = ReasoningParserManager.get_reasoning_parser("deepseek_v41")
reasoning = parser(tokenizer, chat_template_kwargs={"thinking": True})
calls = ToolParserManager.get_tool_parser("deepseek_v41")(tokenizer, request.tools)
mark = "\\uff5cDSML\\uff5c"
text = (f'<{mark} calls>\\n<{mark} invoke name="f">\\n<{mark} parameter name="x" string="false">5</{mark} parameter>\\n'
        f'</{mark} invoke>\\n</{mark} calls>')
found = calls.extract_tool_calls(text, request)
print("RESULT" + json.dumps({
    "prompt": prompt,
    "reasoning": reasoning.extract_reasoning("because</think>so", request),
    "calls": [[call.function.name, call.function.arguments] for call in found.tool_calls],
}))
"""


def test_chat_template_and_parsers_of_the_architecture_resolve(checkpoint: CheckpointFixture) -> None:
    command = [sys.executable, "-c", PARSERS, str(checkpoint("nano", 0))]
    result = subprocess.run(
        command, capture_output=True, text=True, env=envs.child_environment(), timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    assert "<｜User｜>hi<｜Assistant｜>" in found["prompt"]
    assert found["reasoning"] == ["because", "so"]
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == [("f", {"x": 5})]
