"""Drafters at their limits change the number of steps only: always right, always wrong, NaN, no ids at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.speculative.test_engine_drafts import speculative_flag

Results = Mapping[str, RunResult]

NUM_DRAFTS = 5
NUM_OUTPUT = {"quick": 67, "full": 403}  # 1 + 11 * 6, 1 + 67 * 6: blocks of drafts and their bonus, behind the prompt
MOST_STEPS_A_TOKEN, MOST_STEPS_OF_WRONG = 0.18, 1.15
NUM_OF_IMPOSSIBLE = 20
SAMPLING: tuple[Mapping[str, object], ...] = ({}, {"temperature": 1.0, "seed": 7})
CROWD = tuple(f"crowd{number}" for number in range(len(SAMPLING)))
ALL, IMPOSSIBLE = ("alone", *CROWD), ("nan", "outside")


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 200, (count,), generator=generator).tolist())


def _run(name: str, model: Path, num_output: int, drafter: str | None) -> EngineRun:
    """A request by itself, then several at once; impossible drafts get short answers of the latter only."""
    alone = Request(name="alone", tokens=_tokens(1, 20), max_tokens=num_output)
    crowd = tuple(
        Request(name=name, tokens=_tokens(2 + number, 5 + 9 * number), max_tokens=num_output, sampling=sampling)
        for number, (name, sampling) in enumerate(zip(CROWD, SAMPLING, strict=True))
    )
    actions = (Action(add=crowd),) if name in IMPOSSIBLE else (Action(add=(alone,)), Action(add=crowd))
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=("--block-size=32", *([] if drafter is None else [speculative_flag(NUM_DRAFTS)])),
        actions=actions,
        drafter=drafter,
    )


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture, request: pytest.FixtureRequest) -> Results:
    """All engines; the one without drafts is first, so that drafters know its answers."""
    model, count = checkpoint("nano", 0), NUM_OUTPUT[request.config.getoption("--depth")]
    runs = [_run("off", model, count, None)]
    runs += [_run(drafter, model, count, drafter) for drafter in ("right", "wrong")]
    runs += [_run(drafter, model, NUM_OF_IMPOSSIBLE, drafter) for drafter in IMPOSSIBLE]
    return run_engines(runs)


def _num_steps(results: Results, run: str, names: tuple[str, ...]) -> int:
    """Engine steps that computed any of these requests."""
    return sum(any(name in step for name in names) for step in results[run].facts.steps)


@pytest.mark.parametrize("drafter", ["right", "wrong", *IMPOSSIBLE])
def test_drafts_change_no_bit(drafter: str, results: Results) -> None:
    for name, found in results[drafter].requests.items():
        want, count = results["off"].requests[name], NUM_OF_IMPOSSIBLE if drafter in IMPOSSIBLE else None
        assert found.tokens[0].tolist() == want.tokens[0].tolist()[:count], name
        assert_bitwise_equal(found.rows, want.rows[:count], f"{drafter}, {name}")
    assert sum(results[drafter].facts.drafts["verified"]) > 0


@pytest.mark.parametrize("names", [("alone",), CROWD], ids=["one request", "several"])
def test_right_drafts_take_few_steps_a_token(names: tuple[str, ...], results: Results) -> None:
    num_tokens = max(len(results["right"].requests[name].tokens[0]) for name in names)
    assert num_tokens in NUM_OUTPUT.values()
    assert _num_steps(results, "right", names) <= MOST_STEPS_A_TOKEN * num_tokens
    assert _num_steps(results, "off", names) >= num_tokens


@pytest.mark.parametrize("names", [("alone",), CROWD], ids=["one request", "several"])
def test_wrong_drafts_take_hardly_more_steps_than_none(names: tuple[str, ...], results: Results) -> None:
    assert sum(results["wrong"].facts.drafts["accepted"]) == 0
    assert _num_steps(results, "wrong", names) <= MOST_STEPS_OF_WRONG * _num_steps(results, "off", names)


@pytest.mark.parametrize("drafter", IMPOSSIBLE)
def test_impossible_drafts_take_no_more_steps_than_wrong_ones(drafter: str, results: Results) -> None:
    assert _num_steps(results, drafter, CROWD) <= MOST_STEPS_OF_WRONG * NUM_OF_IMPOSSIBLE
    drafts = results[drafter].facts.drafts
    assert sum(drafts["accepted"]) < 0.05 * sum(drafts["verified"])
