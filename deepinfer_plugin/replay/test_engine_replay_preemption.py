"""A request that is preempted inside its kept rows, or behind them, keeps the floor of its prompt and its bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.replay.faults"
KEEP, BLOCK, NUM_OUTPUT, LONGEST = 20, 32, 14, 128
INSIDE, BEHIND = 110, 90  # prompts that lose their blocks among their kept rows, and after their first output tokens
NO_CACHE = "--no-enable-prefix-caching"
# Four urgent requests decode with most of each step's tokens; the watched one grows by what is left, until they need
# the last blocks.
POOL = {INSIDE: 66, BEHIND: 70}


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())


def _watched(length: int) -> Request:
    return Request(name=f"p{length}", tokens=_tokens(length, length), max_tokens=NUM_OUTPUT, priority=1)


def _engine(name: str, model: Path, actions: list[Action], *flags: str, encoder: str, fault: str = "") -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.REF,
        flags=(f"--block-size={BLOCK}", f"--max-model-len={LONGEST}", "--scheduling-policy=priority", *flags),
        actions=tuple(actions),
        faults=(f"{FAULTS}:{fault}",) if fault else (),
        variables={MODE_VARIABLE: "compact", KEEP_VARIABLE: str(KEEP), ENCODER_VARIABLE: encoder},
    )


def _pressed(name: str, model: Path, length: int, *flags: str, encoder: str = "exact", fault: str = "") -> EngineRun:
    urgent = tuple(Request(name=f"o{i}", tokens=_tokens(500 + i, 25 + i), max_tokens=60) for i in range(4))
    pool = (f"--num-gpu-blocks-override={POOL[length]}", "--max-num-batched-tokens=8", "--max-num-seqs=8")
    actions = [Action(add=urgent, steps=2), Action(add=(_watched(length),))]
    return _engine(name, model, actions, *pool, *flags, encoder=encoder, fault=fault)


SCENES = {  # name -> (length of the watched prompt, encoder policy, flags)
    "inside": (INSIDE, "exact", (NO_CACHE,)),
    "behind": (BEHIND, "exact", (NO_CACHE,)),
    "behind, cached": (BEHIND, "exact", ()),
    "inside, segment": (INSIDE, f"segment:{BLOCK}", (NO_CACHE,)),
    "behind, segment": (BEHIND, f"segment:{BLOCK}", (NO_CACHE,)),
}


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    model = checkpoint("nano", 0)
    alone = [Action(add=(_watched(length),)) for length in (INSIDE, BEHIND)]
    runs = [
        _engine(f"alone {policy}", model, alone, NO_CACHE, encoder=policy) for policy in ("exact", f"segment:{BLOCK}")
    ]
    runs += [_pressed(name, model, length, *flags, encoder=policy) for name, (length, policy, flags) in SCENES.items()]
    runs.append(_pressed("fault", model, BEHIND, NO_CACHE, fault="floor_lost_after_preemption"))
    return run_engines(runs, num_children=2)


def _progress(results: Results, name: str, length: int) -> int:
    """Tokens that the watched request had computed when it lost its blocks."""
    facts = results[name].requests[f"p{length}"].facts
    assert facts.num_preemptions == 1
    resumed = results[name].facts.replay["hit_rows"]  # the only hit there is
    return sum(facts.chunks[0]) + resumed - (length + NUM_OUTPUT - 1)


@pytest.mark.parametrize("name", SCENES)
def test_a_preempted_request_keeps_its_bits(name: str, results: Results) -> None:
    length, policy, _ = SCENES[name]
    progress = _progress(results, name, length)
    if length == INSIDE:
        assert length - KEEP < progress < length
    else:
        assert length < progress < length + NUM_OUTPUT - 1
    got, want = results[name].requests[f"p{length}"], results[f"alone {policy}"].requests[f"p{length}"]
    assert torch.equal(got.tokens[0], want.tokens[0])
    assert torch.equal(got.logits[0], want.logits[0])


def test_a_resumed_request_computes_its_kept_rows_and_what_it_had_generated(results: Results) -> None:
    progress = _progress(results, "behind", BEHIND)
    skipped = results["behind"].facts.replay["skipped_decoder_rows"]
    others = sum(
        max(0, 25 + i - KEEP) * (1 + results["behind"].requests[f"o{i}"].facts.num_preemptions) for i in range(4)
    )
    assert progress > BEHIND
    assert skipped == 2 * (BEHIND - KEEP) + others


def test_the_floor_of_prompt_and_generated_tokens_is_noticed(results: Results) -> None:
    fault = results["fault"]
    assert fault.facts.fault_calls[f"{FAULTS}:floor_lost_after_preemption"] > 0
    got, want = fault.requests[f"p{BEHIND}"], results["alone exact"].requests[f"p{BEHIND}"]
    assert not torch.equal(got.logits[0], want.logits[0])
