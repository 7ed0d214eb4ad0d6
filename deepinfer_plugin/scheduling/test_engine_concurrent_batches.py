"""An engine that plans two or three steps ahead gives the bits of one that plans none, also to grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.platforms.cpu import ASYNC_SCHEDULING
from deepinfer_plugin.scheduling.concurrent_batches import OPTION
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.scheduling.faults"
WATCH, HURRY = f"{FAULTS}:tokens_in_flight", f"{FAULTS}:grammar_in_every_step"
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 11}
REGEX = {"structured_outputs": {"regex": "[0-9]{6,9}"}, "ignore_eos": False, "temperature": 1.0, "seed": 4}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": WARM,
    "penalties": {**WARM, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {1: 100.0}, "ignore_eos": False, "min_tokens": 5},
    "regex": REGEX,
    "grammar": {**REGEX, "structured_outputs": {"grammar": 'root ::= ("a" | "b" | "cc"){7,9}'}},
}
AHEAD = {"two": 2, "four": 4}  # engine -> steps at once


def _requests() -> tuple[Request, ...]:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 25, 60, 90)  # all but the first grow into another block
    drawn = [tuple(torch.randint(3, 250, (length,), generator=generator).tolist()) for length in lengths]
    return tuple(
        Request(name=f"{name} {number}", tokens=tokens, max_tokens=9 + 2 * number, sampling=sampling)
        for name, sampling in SAMPLING.items()
        for number, tokens in enumerate(drawn)
    )


def _engine(name: str, model: str, flags: tuple[str, ...], *faults: str) -> EngineRun:
    requests = _requests()
    actions = (
        Action(add=requests[:9], steps=3),
        Action(add=(*requests[9:], Request(name="gone", tokens=(5, 6, 7), max_tokens=50)), steps=4),
        Action(abort=("gone",)),
    )
    common = ("--max-num-seqs=32", "--block-size=32", "--max-num-batched-tokens=64")
    return EngineRun(
        name=name, model=model, arithmetic=Arithmetic.REF, flags=(*common, *flags), actions=actions, faults=faults
    )


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    model = str(checkpoint("nano", 0))

    def ahead(count: int) -> tuple[str, ...]:
        return ("--async-scheduling", f"--additional-config={json.dumps({ASYNC_SCHEDULING: True, OPTION: count})}")

    # few pages: requests are preempted while steps that compute them are under way
    pressed = ("--num-gpu-blocks-override=45", "--max-model-len=128")
    runs = [_engine("none", model, ("--no-async-scheduling",))]
    runs += [_engine(name, model, ahead(count), WATCH) for name, count in AHEAD.items()]
    runs.append(_engine("pressed", model, (*ahead(3), *pressed), WATCH))
    runs.append(_engine("hurried", model, ahead(3), HURRY))
    return run_engines(runs, num_children=2)


def _assert_equal(results: Results, name: str, requests: tuple[str, ...]) -> None:
    for request in requests:
        got, want = (results[engine].requests[request] for engine in (name, "none"))
        assert want.facts.finished
        assert torch.equal(got.tokens[0], want.tokens[0]), request
        assert_bitwise_equal(got.logits[0], want.logits[0], request)


NAMES = tuple(request.name for request in _requests())


@pytest.mark.parametrize("name", [*AHEAD, "pressed"])
def test_answers_keep_their_bits(results: Results, name: str) -> None:
    _assert_equal(results, name, NAMES)
    assert results[name].facts.kv_usage == 0.0


@pytest.mark.parametrize("name", AHEAD)
def test_as_many_steps_are_under_way_as_were_asked_for(results: Results, name: str) -> None:
    seen = results[name].facts.observed[WATCH]
    assert seen["plain"] == AHEAD[name]
    assert seen["grammar"] == min(AHEAD[name], 2), "its next step waits for the token of its last one"


def test_pages_ran_out_in_the_pressed_engine(results: Results) -> None:
    assert sum(request.facts.num_preemptions for request in results["pressed"].requests.values()) > 0


def test_a_grammar_that_does_not_wait_is_noticed(results: Results) -> None:
    assert results["hurried"].facts.fault_calls[HURRY] > 0
    with pytest.raises(AssertionError):
        _assert_equal(results, "hurried", tuple(name for name in NAMES if name.startswith(("regex", "grammar"))))
