"""A drawn answer is a function of its prompt, its parameters and its seed: whole engines, in one child process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepinfer_kernels.sample_tokens import sample_tokens
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.faults import Calls
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RequestResult, RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

NUM_PROMPT, NUM_OUTPUT = 37, 14
SEED = 77
RESTRICTED: Mapping[str, Any] = {
    "temperature": 1.2,
    "top_k": 60,
    "top_p": 0.97,
    "min_p": 0.002,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 3.0, "17": -4.0},
    "min_tokens": 3,
    "seed": SEED,
}
FREE: Mapping[str, Any] = {"temperature": 1.0, "seed": SEED}  # needs no processing, alone nothing is processed
FLAT: Mapping[str, Any] = {"temperature": 2.0, "seed": SEED}  # as flat as vLLM allows: the noise decides most
PLAIN: Mapping[str, Mapping[str, Any]] = {"free": FREE, "greedy": {}}
INDEPENDENT = 0.12  # answers that share no noise agree at fewer places
# What neighbours ask for: every stage of the sampler that a batch could switch on for all.
NEIGHBOURS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "seed": SEED},
    {"temperature": 1.0, "top_p": 0.5, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.3, "n": 2, "seed": 5},
    {"logit_bias": {"9": 80.0}, "repetition_penalty": 1.7},
    {"temperature": 2.0, "seed": -4, "frequency_penalty": 1.0, "logprobs": None},
)


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 200, (count,), generator=generator).tolist())


PROMPT = _tokens(0, NUM_PROMPT)


def _watched(name: str, sampling: Mapping[str, Any] = RESTRICTED, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(name=name, tokens=prompt, max_tokens=NUM_OUTPUT, sampling=sampling)


def _crowd(scene: str, max_tokens: int = 9) -> tuple[Request, ...]:
    return tuple(
        Request(
            name=f"{scene} {number}", tokens=_tokens(50 + number, 5 + 6 * number), max_tokens=max_tokens, sampling=x
        )
        for number, x in enumerate(NEIGHBOURS)
    )


def _streams() -> list[Action]:
    """Requests whose draws must be the same, or must be independent."""
    others = [_tokens(900 + number, NUM_PROMPT) for number in range(3)]
    samples = [_watched(f"sample {i}", {**FLAT, "seed": SEED + i}) for i in range(3)]
    by_alias = _watched("alias", {**FLAT, "seed": None, "extra_args": {"seq_seed": str(SEED + (1 << 64))}})
    without = [_watched(f"without {i}", {"temperature": 2.0}) for i in range(3)]
    broadcast = [_watched(f"broadcast {i}", FLAT, prompt) for i, prompt in enumerate(others)]
    return [
        Action(add=(_watched("three", {**FLAT, "n": 3}), *samples[:1], by_alias, *without)),
        Action(add=(*samples[1:], *broadcast)),
    ]


def _engine(name: str, model: Path, actions: list[Action], *flags: str, fault: str | None = None) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.REF,
        flags=("--block-size=32", *flags),
        actions=tuple(actions),
        faults=(f"{__name__}:{fault}",) if fault else (),
    )


def _runs(model: Path) -> list[EngineRun]:
    alone = [Action(add=(_watched("alone"),)), *(Action(add=(_watched(f"{k} alone", v),)) for k, v in PLAIN.items())]
    amid = _crowd("amid")
    company = [
        Action(add=(*amid[:3], _watched("amid"), *amid[3:], *(_watched(f"{k} amid", v) for k, v in PLAIN.items()))),
        Action(add=_crowd("late"), steps=4),
        Action(add=(_watched("late"),)),
    ]
    others = tuple(
        Request(name=f"pool {i}", tokens=_tokens(70 + i, 60 + i), max_tokens=12, sampling={"temperature": 1.0})
        for i in range(5)
    )
    preempted = Request(name="preempted", tokens=PROMPT, max_tokens=NUM_OUTPUT, sampling=RESTRICTED, priority=1)
    small = ("--max-model-len=128", "--max-num-batched-tokens=128", "--num-gpu-blocks-override=48")
    chunked = Action(add=(_watched("chunked"), *_crowd("chunked")[:2]))
    return [
        _engine("company", model, [*alone, *company, *_streams()]),
        _engine("chunked", model, [chunked], "--max-num-batched-tokens=11", "--max-num-seqs=8"),
        _engine("pool", model, [Action(add=(preempted,), steps=2), Action(add=others)], *small, PRIORITY),
        _engine("processed", model, [*alone, *company], "--logprobs-mode=processed_logprobs"),
        _engine("no prompt", model, _streams(), fault="prompt_left_out"),
        _engine("no position", model, _streams(), fault="position_left_out"),
    ]


PRIORITY = "--scheduling-policy=priority"


@contextmanager
def prompt_left_out() -> Iterator[Calls]:
    """Every prompt has the same hash: one seed gives one noise."""
    count = Calls()

    def constant(prompt_token_ids: object) -> int:
        del prompt_token_ids
        count.calls += 1
        return 1

    with mock.patch("deepinfer_plugin.sampling.sampler.prompt_hash", constant):
        yield count


@contextmanager
def position_left_out() -> Iterator[Calls]:
    """Every position draws with the same noise."""
    count = Calls()

    def changed(
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        prompt_hashes: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        count.calls += 1
        return sample_tokens(logits, temperature, seeds, prompt_hashes, torch.zeros_like(positions))

    with mock.patch("deepinfer_plugin.sampling.sampler.sample_tokens", changed):
        yield count


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    """All engines, in one child."""
    return run_engines(_runs(checkpoint("nano", 0)))


def _tokens_of(result: RequestResult, sample: int = 0) -> list[int]:
    found: list[int] = result.tokens[sample].tolist()
    assert len(found) == NUM_OUTPUT
    return found


def _check(got: RequestResult, alone: RequestResult, label: str) -> None:
    assert _tokens_of(got) == _tokens_of(alone), label
    assert_bitwise_equal(got.logits[0], alone.logits[0], label)


def _share_equal(answers: list[list[int]]) -> float:
    """Of all pairs of answers and all places, the share at which both have the same token."""
    pairs = [(a, b) for i, a in enumerate(answers) for b in answers[:i]]
    return sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True)) / (len(pairs) * NUM_OUTPUT)


@pytest.mark.parametrize("scene", ["amid", "late"])
@pytest.mark.parametrize("run", ["company", "processed"])
def test_company_changes_no_token_and_no_score(run: str, scene: str, results: Results) -> None:
    shared = [step for step in results[run].facts.steps if scene in step and len(step) > 3]
    assert len(shared) >= 5, "the request had company in too few steps"
    _check(results[run].requests[scene], results[run].requests["alone"], f"{run}, {scene}")


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("run", ["company", "processed"])
def test_processing_for_neighbours_changes_no_bit_of_a_plain_request(run: str, kind: str, results: Results) -> None:
    requests = results[run].requests
    _check(requests[f"{kind} amid"], requests[f"{kind} alone"], f"{run}, {kind}")


def test_the_draw_is_no_greedy_choice(results: Results) -> None:
    alone = results["company"].requests["alone"]
    ranks = [int((row >= row[token]).sum()) for row, token in zip(alone.logits[0], _tokens_of(alone), strict=True)]
    assert max(ranks) > 1
    assert max(ranks) <= 60 + len(RESTRICTED["logit_bias"])


def test_chunks_of_the_prompt_change_nothing(results: Results) -> None:
    chunked = results["chunked"].requests["chunked"]
    assert len(chunked.facts.chunks[0]) > NUM_OUTPUT + 2, "the prompt was not cut"
    _check(chunked, results["company"].requests["alone"], "chunks of 11")


def test_a_preemption_keeps_the_stream(results: Results) -> None:
    preempted = results["pool"].requests["preempted"]
    assert preempted.facts.num_preemptions > 0
    assert sum(preempted.facts.chunks[0]) > NUM_PROMPT + NUM_OUTPUT - 1, "nothing was computed again"
    _check(preempted, results["company"].requests["alone"], "preempted")


def test_sample_i_of_n_is_the_answer_to_seed_plus_i(results: Results) -> None:
    requests = results["company"].requests
    samples = [_tokens_of(requests["three"], i) for i in range(3)]
    assert samples == [_tokens_of(requests[f"sample {i}"]) for i in range(3)]
    assert _share_equal(samples) < INDEPENDENT


def test_the_alias_is_the_seed_modulo_2_to_the_64(results: Results) -> None:
    requests = results["company"].requests
    assert _tokens_of(requests["alias"]) == _tokens_of(requests["sample 0"])


def test_requests_without_a_seed_differ(results: Results) -> None:
    assert _share_equal([_tokens_of(results["company"].requests[f"without {i}"]) for i in range(3)]) < 0.5


def _broadcast(results: Results, run: str) -> float:
    requests = results[run].requests
    return _share_equal([_tokens_of(requests[name]) for name in ("sample 0", *(f"broadcast {i}" for i in range(3)))])


def _num_distinct(results: Results, run: str) -> int:
    return len(set(_tokens_of(results[run].requests["sample 0"])))


def test_one_seed_for_many_prompts_gives_each_its_own_noise(results: Results) -> None:
    assert _broadcast(results, "company") < INDEPENDENT


def test_positions_have_their_own_noise(results: Results) -> None:
    assert _num_distinct(results, "company") > NUM_OUTPUT // 2


def test_planted_faults_are_noticed(results: Results) -> None:
    for run in ("no prompt", "no position"):
        assert min(results[run].facts.fault_calls.values()) > 0, "the changed code did not run"
    assert _broadcast(results, "no prompt") > INDEPENDENT
    assert _num_distinct(results, "no position") <= NUM_OUTPUT // 2
