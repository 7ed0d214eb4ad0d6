"""The checkpoint's own drafter through vLLM's engine: the same bits, the drafts of the plain model, and its noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.draft.block_hash import block_hash
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.dspark import ReferenceDrafter, load_draft_weights
from deepinfer_plugin.reference.model import ReferenceModel, load_text_weights
from deepinfer_plugin.replay.settings import KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.draft.faults"
KEEP, NUM_OUTPUT = 20, 16
DRAFTS = (1, 5)
CHUNKED = ("--max-num-batched-tokens=40", "--max-num-seqs=6")
SMALL_POOL = ("--num-gpu-blocks-override=34", "--max-num-batched-tokens=40", "--max-model-len=192")
NUM_BLOCK = 3  # drafts where they are compared with those of the plain model
# flags and planted faults of the engines whose drafts depend on their context
RANDOM: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "random": ((), ()),
    "random chunks": (CHUNKED, ()),
    "context lost": ((), ("context_lost",)),
    "block causal": ((), ("block_causal",)),
}
PREFIX = 128  # tokens that two prompts share: blocks behind the kept rows can hit


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())


def _actions(*, is_drawn: bool, num_output: int) -> tuple[Action, ...]:
    """Prompts of one token to many blocks; then prompts that hit the prefix of an earlier one."""

    def request(name: str, tokens: tuple[int, ...], **sampling: object) -> Request:
        return Request(name=name, tokens=tokens, max_tokens=num_output, sampling=sampling if is_drawn else {})

    shared = _tokens(1, PREFIX)
    cold = [request(f"greedy {length}", _tokens(length, length)) for length in (1, 2, 9, 31, 70)]
    cold.append(request("long", shared + _tokens(2, 21)))
    cold.append(request("drawn", _tokens(3, 33), temperature=1.0, seed=11))
    cold.append(request("cut", _tokens(4, 45), temperature=0.9, seed=12, top_k=40, top_p=0.95))
    warm = (
        request("hit", shared + _tokens(5, 30)),
        request("hit drawn", shared + _tokens(6, 9), temperature=1.0, seed=13),
    )
    return Action(add=tuple(cold)), Action(add=warm)


def _engine(
    name: str,
    model: Path,
    num_drafts: int,
    *flags: str,
    mode: str = "compact",
    faults: tuple[str, ...] = (),
    is_drawn: bool = True,
    num_output: int = NUM_OUTPUT,
) -> EngineRun:
    config = json.dumps({"method": "dspark", "num_speculative_tokens": num_drafts})
    by_variable = {"DEEPINFER_USE_NEXTN_DECODE": str(num_drafts)} if num_drafts == 1 else {}
    speculative = (f"--speculative-config={config}",) if num_drafts > 1 else ()
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=("--block-size=32", *speculative, *flags),
        actions=_actions(is_drawn=is_drawn, num_output=num_output),
        faults=tuple(f"{FAULTS}:{fault}" for fault in faults),
        variables={MODE_VARIABLE: mode, KEEP_VARIABLE: str(KEEP), **by_variable},
    )


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFixture) -> Path:
    """A checkpoint most of whose drafts are right."""
    return checkpoint("nano", 0, drafts_agree=True)


@pytest.fixture(scope="module")
def random_model(checkpoint: CheckpointFixture) -> Path:
    """One whose drafts depend on their context."""
    return checkpoint("nano", 0)


@pytest.fixture(scope="module")
def results(model: Path, random_model: Path) -> Results:
    """All engines, in one child."""
    runs = [_engine("off", model, 0), _engine("off, all rows", model, 0, mode="off")]
    runs += [_engine(f"{count} drafts", model, count) for count in DRAFTS]
    runs.append(_engine("preempted", model, 5, *SMALL_POOL))
    runs.append(_engine("all rows", model, 3, *CHUNKED, mode="off"))
    runs.append(_engine("other noise", model, 5, faults=("other_noise",)))
    runs.append(_engine("truth", random_model, 0, is_drawn=False, num_output=NUM_OUTPUT + 4))
    runs += [
        _engine(name, random_model, NUM_BLOCK, *flags, faults=("verified_drafts", *faults), is_drawn=False)
        for name, (flags, faults) in RANDOM.items()
    ]
    return run_engines(runs)


SAME = {
    **{f"{count} drafts": "off" for count in DRAFTS},
    "preempted": "off",
    "all rows": "off, all rows",
    "other noise": "off",
    **dict.fromkeys(RANDOM, "truth"),
}


@pytest.mark.parametrize("run", SAME)
def test_drafts_change_no_bit(run: str, results: Results) -> None:
    want = results[SAME[run]].requests
    for name, found in results[run].requests.items():
        assert found.tokens[0].tolist() == want[name].tokens[0].tolist()[:NUM_OUTPUT], name
        assert_bitwise_equal(found.rows, want[name].rows[:NUM_OUTPUT], f"{run}, {name}")
    assert results[run].facts.drafts["verified"][0] > 0


def test_prompts_hit_the_prefix_cache(results: Results) -> None:
    for run in ("off", "5 drafts", "all rows", "random"):
        requests = results[run].requests
        assert min(requests[name].facts.num_cached_tokens for name in ("hit", "hit drawn")) > 0, run


def test_requests_are_preempted(results: Results) -> None:
    facts = [request.facts for request in results["preempted"].requests.values()]
    assert sum(fact.num_preemptions for fact in facts) > 0


def test_agreeing_drafts_save_steps(results: Results) -> None:
    for count in DRAFTS:
        accepted = results[f"{count} drafts"].facts.drafts["accepted"]
        assert all(accepted[position] > 0 for position in range(count)), accepted
    steps = [len(results[run].facts.steps) for run in ("5 drafts", "1 drafts", "off")]
    assert steps == sorted(steps)
    assert steps[0] < 0.7 * steps[-1]


def test_drafts_are_drawn_with_the_noise_of_their_position(results: Results) -> None:
    """With other noise the drafts of drawn requests are mostly wrong; greedy ones do not notice."""
    same, other = (sum(results[run].facts.drafts["accepted"]) for run in ("5 drafts", "other noise"))
    assert results["other noise"].facts.fault_calls[f"{FAULTS}:other_noise"] > 0
    assert other < 0.9 * same


@dataclass(slots=True)
class Expected:
    """Of the plain model: drafts that decoding accepts by place in the block, and the hash of all blocks."""

    accepted: list[int] = field(default_factory=lambda: [0] * NUM_BLOCK)
    hash: int = 0


@pytest.fixture(scope="module")
def expected(results: Results, random_model: Path) -> Expected:
    """Over all requests of "truth"."""
    config = ModelConfig.from_model_dir(random_model)
    text = ReferenceModel(config, load_text_weights(random_model), Arithmetic.S32)
    drafter = ReferenceDrafter(config, load_draft_weights(random_model), Arithmetic.S32)
    found = Expected()
    for action in _actions(is_drawn=False, num_output=NUM_OUTPUT):
        for request in action.add:
            answer = results["truth"].requests[request.name].tokens[0].tolist()
            tokens = torch.tensor([*request.tokens, *answer])
            trace: dict[str, torch.Tensor] = {}
            text.prefill(tokens, trace)
            cache = drafter.new_cache(len(tokens) + NUM_BLOCK)
            num_done = 1
            while num_done < NUM_OUTPUT:
                last = len(request.tokens) + num_done - 2
                drafter.store_context(trace["main_hidden"][: last + 1], torch.arange(last + 1), cache)
                drafts = drafter.draft(answer[num_done - 1], last, NUM_BLOCK, cache).tokens.tolist()
                found.hash += block_hash(last + 1, [answer[num_done - 1], *drafts])
                truth = answer[num_done : num_done + NUM_BLOCK]
                kept = next((i for i in range(NUM_BLOCK) if drafts[i] != truth[i]), NUM_BLOCK)
                for place in range(kept):
                    found.accepted[place] += 1
                num_done += kept + 1
    return found


def _hash(result: RunResult) -> int:
    return result.facts.fault_calls[f"{FAULTS}:verified_drafts"]


@pytest.mark.parametrize("run", ["random", "random chunks"])
def test_the_drafts_are_those_of_the_plain_model(run: str, results: Results, expected: Expected) -> None:
    """Behind prefills, chunks, hits and every verified step the blocks read the context that they should."""
    assert expected.accepted[0] > 5
    assert list(results[run].facts.drafts["accepted"][:NUM_BLOCK]) == expected.accepted
    assert _hash(results[run]) == expected.hash


@pytest.mark.parametrize("run", ["context lost", "block causal"])
def test_drafts_that_read_something_else_are_noticed(run: str, results: Results, expected: Expected) -> None:
    (fault,) = RANDOM[run][1]
    assert results[run].facts.fault_calls[f"{FAULTS}:{fault}"] > 0
    assert _hash(results[run]) != expected.hash
