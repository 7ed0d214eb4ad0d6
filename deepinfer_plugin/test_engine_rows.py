"""One prompt keeps every bit of its fp32 logits: in any company, in odd chunks, after a hit, after a preemption.

Runs in the served arithmetic (``ref``), all engines in two children. Planted faults show that each
comparison would notice; every mechanism is shown to have happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RequestResult, RunResult, run_engines
from deepinfer_plugin.replay.settings import MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

NAMES = ("nano", "tiny")
VOCABULARY = 200  # ids that both small models have, without the special ones at the end
NUM_PROMPT, NUM_OUTPUT = 75, 14
BLOCK_FLAG = "--block-size=32"
CHUNK_FLAGS = ("--max-num-batched-tokens=17", "--max-num-seqs=8", "--long-prefill-token-threshold=7")
SMALL_POOL = {  # enough blocks for one request of 128 tokens, too few for the preemption scene
    "nano": ("--num-gpu-blocks-override=40", "--max-num-batched-tokens=64"),
    "tiny": ("--num-gpu-blocks-override=72", "--max-num-batched-tokens=128"),
}
FAULTS = "deepinfer_plugin.engine_child.faults"


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, VOCABULARY, (count,), generator=generator).tolist())


PROMPT = _tokens(0, NUM_PROMPT)


def _watched(name: str, prompt_rows: bool = True) -> Request:
    return Request(name=name, tokens=PROMPT, max_tokens=NUM_OUTPUT, prompt_rows=prompt_rows)


def _other(scene: str, number: int, count: int, max_tokens: int = 6) -> Request:
    return Request(name=f"{scene} other {number}", tokens=_tokens(100 + number, count), max_tokens=max_tokens)


def _alone() -> list[Action]:
    return [Action(add=(_watched("alone"),))]


def _in_company() -> list[Action]:
    """Five batches: last of three, first of five, amid many short ones, joining decodes, joined by a long prompt."""
    amid = [_other("amid", i, 1 + i % 5) for i in range(15)]
    return [
        Action(add=(_other("last", 0, 40), _other("last", 1, 9), _watched("last"))),
        Action(add=(_watched("first"), *(_other("first", i, 17 * i + 1) for i in range(4)))),
        Action(add=(*amid[:7], _watched("amid"), *amid[7:])),
        Action(add=tuple(_other("joins", i, 21 + i, max_tokens=12) for i in range(3)), steps=4),
        Action(add=(_watched("joins"),)),
        Action(add=(_other("joined", 0, 5, max_tokens=12), _watched("joined")), steps=5),
        Action(add=(_other("joined", 1, 120), _other("joined", 2, 31))),
    ]


def _after_a_hit() -> list[Action]:
    """The prefix cache holds the prompt already; alone, and behind others."""
    return [
        Action(add=(_watched("hit", prompt_rows=False),)),
        Action(add=(_other("hit behind", 0, 50), _watched("hit behind", prompt_rows=False))),
    ]


def _preempted() -> list[Action]:
    """The least urgent request is the first to go when blocks run out, as the others grow into their third block."""
    watched = replace(_watched("preempted", prompt_rows=False), priority=1)
    others = tuple(_other("preempted", i, 60 + i, max_tokens=12) for i in range(5))
    return [Action(add=(watched,), steps=2), Action(add=others)]


def _in_chunks() -> list[Action]:
    """Alone the whole budget of a step is taken; next to another request vLLM's threshold for long prompts acts."""
    return [
        Action(add=(_watched("chunks of 17"),)),
        Action(add=(_other("chunks", 0, 3, max_tokens=20), _watched("chunks of 7"))),
    ]


def _small_pool(name: str) -> tuple[str, ...]:
    return ("--max-model-len=128", "--scheduling-policy=priority", *SMALL_POOL[name])


def _engine(name: str, model: Path, actions: list[Action], *flags: str, fault: str | None = None) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.REF,
        flags=(BLOCK_FLAG, *flags),
        actions=tuple(actions),
        faults=(f"{FAULTS}:{fault}",) if fault else (),
        variables={MODE_VARIABLE: "off"},  # prompt rows are compared, and hits of short prompts
    )


def _runs(name: str, model: Path) -> list[EngineRun]:
    pool = _small_pool(name)
    return [
        _engine(f"{name} company", model, [*_alone(), *_in_company(), *_after_a_hit()]),
        _engine(f"{name} chunks", model, _in_chunks(), *CHUNK_FLAGS),
        _engine(f"{name} preempted", model, _preempted(), *pool),
        _engine(f"{name} recomputed", model, _preempted(), *pool, "--no-enable-prefix-caching"),
    ]


def _faulty_runs(model: Path) -> list[EngineRun]:
    tiles, window, history = "row_tiles_off", "window_short_after_the_first_request", "history_lost_at_chunk_borders"
    return [
        _engine("tiles", model, [*_alone(), *_in_company()[:2]], fault=tiles),
        _engine("window", model, [*_alone(), *_in_company()[:2]], fault=window),
        _engine("chunks", model, _in_chunks(), *CHUNK_FLAGS, fault=history),
        _engine("hit", model, [*_alone(), *_after_a_hit()], fault=history),
        _engine("preempted", model, _preempted(), *_small_pool("nano"), fault=window),
    ]


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    """All engines, in two children."""
    runs = [run for name in NAMES for run in _runs(name, checkpoint(name, 0))]
    return run_engines([*runs, *_faulty_runs(checkpoint("nano", 0))], num_children=2)


def _check(got: RequestResult, alone: RequestResult, label: str) -> None:
    """Every row that came must have the bits it has alone: the generated ones, and the prompt's where asked for."""
    assert len(got.tokens[0]) == NUM_OUTPUT, label
    assert torch.equal(got.tokens[0], alone.tokens[0]), f"{label}: tokens {got.tokens[0]}, alone {alone.tokens[0]}"
    assert_bitwise_equal(got.logits[0], alone.logits[0], label)
    if got.prompt_logits is not None:
        assert alone.prompt_logits is not None
        assert_bitwise_equal(got.prompt_logits, alone.prompt_logits, f"{label}, prompt")


def _alone_in(results: Results, run: str) -> RequestResult:
    return results[run].requests["alone"]


@pytest.mark.parametrize("scene", ["last", "first", "amid", "joins", "joined"])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_keeps_its_bits_in_company(name: str, scene: str, results: Results) -> None:
    run = results[f"{name} company"]
    shared = [step for step in run.facts.steps if scene in step and len(step) > 1]
    assert len(shared) >= 5, "the prompt had company in too few steps"
    _check(run.requests[scene], _alone_in(results, f"{name} company"), f"{name} {scene}")


@pytest.mark.parametrize("size", [17, 7])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_keeps_its_bits_in_odd_chunks(name: str, size: int, results: Results) -> None:
    result = results[f"{name} chunks"].requests[f"chunks of {size}"]
    prompt_chunks = result.facts.chunks[0][: 1 - NUM_OUTPUT]
    assert sum(prompt_chunks) == NUM_PROMPT
    assert len(prompt_chunks) > 1
    assert max(prompt_chunks) == size
    _check(result, _alone_in(results, f"{name} company"), f"{name} chunks of {size}")


@pytest.mark.parametrize("scene", ["hit", "hit behind"])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_keeps_its_bits_after_a_prefix_hit(name: str, scene: str, results: Results) -> None:
    result = results[f"{name} company"].requests[scene]
    assert result.facts.num_cached_tokens == 64
    _check(result, _alone_in(results, f"{name} company"), f"{name} {scene}")


@pytest.mark.parametrize("engine", ["preempted", "recomputed"])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_keeps_its_bits_after_a_preemption(name: str, engine: str, results: Results) -> None:
    result = results[f"{name} {engine}"].requests["preempted"]
    assert result.facts.num_preemptions > 0
    num_computed = sum(result.facts.chunks[0])
    assert num_computed > NUM_PROMPT + NUM_OUTPUT - 1, "nothing was computed again"
    _check(result, _alone_in(results, f"{name} company"), f"{name} {engine}")


@pytest.mark.parametrize(
    ("run", "requests"),
    [
        ("tiles", ["last", "first"]),
        ("window", ["last"]),
        ("chunks", ["chunks of 17", "chunks of 7"]),
        ("hit", ["hit", "hit behind"]),
        ("preempted", ["preempted"]),
    ],
)
def test_a_planted_fault_is_noticed(run: str, requests: list[str], results: Results) -> None:
    assert min(results[run].facts.fault_calls.values()) > 0, "the changed code did not run"
    for name in requests:
        alone = _alone_in(results, run if "alone" in results[run].requests else "nano company")
        with pytest.raises(AssertionError):
            _check(results[run].requests[name], alone, f"{run} {name}")
