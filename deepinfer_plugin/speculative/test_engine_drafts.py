"""Drafts change the number of steps and never the answer: engines with injected drafters, in one child process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

NUM_OUTPUT = 22
NUM_DRAFTS = 5

# What a request may ask for, each applied row by row as if the request decoded one token at a time.
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "free": {"temperature": 1.0, "seed": 7},
    "flat": {"temperature": 2.0, "seed": 8},
    "penalties": {"temperature": 0.6, "seed": 9, "presence_penalty": 1.1, "frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"temperature": 1.2, "seed": 10, "logit_bias": {"5": 3.0, "17": -4.0}, "min_p": 0.002},
    "cut": {"temperature": 1.2, "seed": 11, "top_k": 30, "top_p": 0.9},
    "minimum": {"temperature": 2.0, "seed": 12, "min_tokens": 9, "stop_token_ids": list(range(10, 100))},
    "stop ids": {"temperature": 2.0, "seed": 13, "stop_token_ids": list(range(10, 30))},
    "stop text": {"temperature": 2.0, "seed": 14, "stop": ["e", "a"], "min_tokens": 4},
    "bad words": {"bad_words": ["a", "b", "th"]},
    "samples": {"temperature": 1.0, "seed": 15, "n": 2},
    "ids": {"temperature": 1.0, "seed": 16, "logprob_token_ids": [5, 6, 7], "logprobs": None},
    "top": {"temperature": 1.0, "seed": 17, "logprobs": 4, "extra_args": {"force_top_k": 9}},
    "banned": {"temperature": 2.0, "seed": 18, "extra_args": {"token_blacklist": [[10, 120]]}},
    "golden": {"temperature": 1.0, "seed": 19, "extra_args": {"golden_token_ids": [9, 9, 9, 8, 7, 6, 5, 9]}},
    "sums": {"temperature": 1.0, "seed": 20, "extra_args": {"sum_smaller_probs": True}},
    "regex": {"temperature": 1.0, "seed": 21, "structured_outputs": {"regex": "[0-9]{12,18}"}, "ignore_eos": False},
    "choice": {"structured_outputs": {"choice": ["no no no no", "no no no yes", "maybe"]}, "ignore_eos": False},
}
SHORT_ENDS = ("minimum", "stop ids", "stop text", "regex", "choice")

DRAFTERS = {
    "right": ("right", None),
    "wrong": ("wrong", None),
    "ragged": ("partly", "random"),
    "outside": ("outside", None),
    "n-grams": (None, None),
}
FEWER_DRAFTS = (1, 3)


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 200, (count,), generator=generator).tolist())


def _requests() -> tuple[Request, ...]:
    """Prompts of odd and even lengths, from one token to past a page."""
    return tuple(
        Request(name=name, tokens=_tokens(number, 1 + 5 * number), max_tokens=NUM_OUTPUT, sampling=sampling)
        for number, (name, sampling) in enumerate(SAMPLING.items())
    )


def speculative_flag(num_drafts: int) -> str:
    """An engine with drafts of n-grams, whose drafter can be replaced."""
    config = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    return f"--speculative-config={json.dumps(config)}"


def _run(name: str, model: Path, num_drafts: int, drafter: str | None = None, lengths: str | None = None) -> EngineRun:
    flags = ("--block-size=32", *([speculative_flag(num_drafts)] if num_drafts > 0 else []))
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=flags,
        actions=(Action(add=_requests()),),
        drafter=drafter,
        lengths=lengths,
    )


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    """All engines; the one without drafts is first, so that drafters know its answers."""
    model = checkpoint("nano", 0)
    runs = [_run("off", model, 0)]
    runs += [_run(name, model, NUM_DRAFTS, *kinds) for name, kinds in DRAFTERS.items()]
    runs += [_run(f"partly {count}", model, count, "partly") for count in FEWER_DRAFTS]
    return run_engines(runs)


def _num_tokens(result: RunResult) -> int:
    return sum(len(tokens) for request in result.requests.values() for tokens in request.tokens)


@pytest.mark.parametrize("run", [*DRAFTERS, *(f"partly {count}" for count in FEWER_DRAFTS)])
def test_drafts_change_no_token_no_score_and_no_end(run: str, results: Results) -> None:
    off, on = results["off"].requests, results[run].requests
    for name, want in off.items():
        assert want.facts.error is None, (name, want.facts.error)
        assert on[name].facts.outputs == want.facts.outputs, name
        for tokens, logits, other, other_logits in zip(
            want.tokens, want.logits, on[name].tokens, on[name].logits, strict=True
        ):
            assert tokens.tolist() == other.tolist(), name
            assert_bitwise_equal(other_logits, logits, f"{run}, {name}")
    assert sum(results[run].facts.drafts["verified"]) > 100


def test_the_answers_of_the_engine_without_drafts_are_of_all_kinds(results: Results) -> None:
    off = results["off"].requests
    assert sum(results["off"].facts.drafts["verified"]) == 0
    for name in SHORT_ENDS:
        assert len(off[name].tokens[0]) < NUM_OUTPUT, f"{name} ended by its length"
    assert len(off["minimum"].tokens[0]) >= 9
    assert _num_tokens(results["off"]) > 250


def test_every_draft_of_a_drafter_that_is_always_right_stands(results: Results) -> None:
    drafts = results["right"].facts.drafts
    assert drafts["accepted"][0] > 0.9 * drafts["verified"][0]


def test_no_draft_of_a_drafter_that_is_always_wrong_stands(results: Results) -> None:
    drafts = results["wrong"].facts.drafts
    assert sum(drafts["accepted"]) == 0
    assert len(results["wrong"].facts.steps) <= 1.15 * len(results["off"].facts.steps)


def test_every_acceptance_length_occurs(results: Results) -> None:
    for run, count in (("ragged", NUM_DRAFTS), *((f"partly {count}", count) for count in FEWER_DRAFTS)):
        accepted = (*results[run].facts.drafts["accepted"], 0)
        ends = [accepted[i] - accepted[i + 1] for i in range(count)]
        assert min(ends) > 0, (run, accepted)


def test_lengths_that_are_cut_are_ragged(results: Results) -> None:
    verified = results["ragged"].facts.drafts["verified"]
    assert all(verified[i] > verified[i + 1] for i in range(NUM_DRAFTS - 1))
