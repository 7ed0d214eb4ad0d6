"""Golden logits through vLLM's engine: one chunk, odd chunks, token by token, prefix hits; three arithmetics.

All engines run in two children. Tolerances are those of golden/README.md §5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RequestResult, RunResult, run_engines
from deepinfer_plugin.reference.golden import (
    ARGMAX_SHARE,
    CHECKPOINTS,
    REF_MEDIAN,
    STABLE_ATOL,
    STABLE_SHARE,
    Checkpoint,
    GoldenCase,
    RowErrors,
    decode_cases,
    find_golden,
    prefill_cases,
)
from deepinfer_plugin.replay.settings import MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

BLOCK_SIZE = 32
ODD_BUDGET = 33  # tokens of one step: long prompts are cut at odd places, and share steps with decoding requests
WHOLE_FLAGS = (f"--block-size={BLOCK_SIZE}", "--max-num-batched-tokens=4096")
ODD_FLAGS = (f"--block-size={BLOCK_SIZE}", f"--max-num-batched-tokens={ODD_BUDGET}", "--max-num-seqs=16")
MAX_SHORT = 72  # prompts up to here run in one chunk, longer ones in odd chunks
LONG_IN_ONE_CHUNK = "prefill seq0"
SINGLE_TOKENS = "prefill robust0"  # fed one token at a time as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One golden case as one request."""

    case: GoldenCase
    name: str
    num_prompt: int
    with_prompt_rows: bool

    @property
    def request(self) -> Request:
        tokens = tuple(self.case.tokens.tolist())
        return Request(
            name=self.name,
            tokens=tokens[: self.num_prompt],
            forced=tokens[self.num_prompt :],
            prompt_rows=self.with_prompt_rows,
        )

    def errors(self, result: RequestResult) -> RowErrors:
        """Compare the recorded rows; the first row that came is 0, or the last of the prompt."""
        first = 0 if self.with_prompt_rows else self.num_prompt - 1
        return RowErrors.of(self.case, result.rows[self.case.rows - first])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One engine: cases sent together, then cases sent again for the prefix cache to find."""

    key: Checkpoint
    arithmetic: Arithmetic
    is_odd: bool
    feeds: tuple[Feed, ...]
    again: tuple[Feed, ...]

    @property
    def name(self) -> str:
        return f"{self.key.folder} {self.arithmetic.value} {'odd chunks' if self.is_odd else 'one chunk'}"

    def engine_run(self, model: str) -> EngineRun:
        actions = [Action(add=tuple(feed.request for feed in feeds)) for feeds in (self.feeds, self.again) if feeds]
        return EngineRun(
            name=self.name,
            model=model,
            arithmetic=self.arithmetic,
            flags=ODD_FLAGS if self.is_odd else WHOLE_FLAGS,
            actions=tuple(actions),
            variables={MODE_VARIABLE: "off"},  # the recorded rows come from full windows
        )


def _cases(key: Checkpoint, arithmetic: Arithmetic) -> list[GoldenCase]:
    found: list[GoldenCase] = []
    for name, read in (("prefill", prefill_cases), ("decode", decode_cases)):
        path = find_golden(f"{key.folder}/{name}.safetensors")
        found += read(path, key, arithmetic) if path is not None else []
    return found


def _is_long_prefill(case: GoldenCase) -> bool:
    return case.label.startswith("prefill") and case.num_prompt > MAX_SHORT


def _feed(case: GoldenCase, suffix: str = "") -> Feed:
    is_prefill = case.label.startswith("prefill")
    return Feed(case=case, name=case.label + suffix, num_prompt=case.num_prompt, with_prompt_rows=is_prefill)


def _whole(key: Checkpoint, arithmetic: Arithmetic) -> Scene:
    """Every case but the long prompts; one long prompt of the first seeds."""
    cases = [
        case
        for case in _cases(key, arithmetic)
        if not _is_long_prefill(case) or (key.seed == 0 and case.label == LONG_IN_ONE_CHUNK)
    ]
    return Scene(key=key, arithmetic=arithmetic, is_odd=False, feeds=tuple(map(_feed, cases)), again=())


def _odd(key: Checkpoint, arithmetic: Arithmetic) -> Scene:
    """In ``s32`` what ``_whole`` leaves out and the decode cases that can hit; else the cases of ``_whole``, cut."""
    cases = _cases(key, arithmetic)
    again = [case for case in cases if case.label.startswith("decode") and case.num_prompt > BLOCK_SIZE]
    if arithmetic is Arithmetic.S32:
        feeds = [_feed(case) for case in cases if _is_long_prefill(case)] + [_feed(case) for case in again]
    else:
        feeds = list(_whole(key, arithmetic).feeds)
    for case in cases:
        if arithmetic is Arithmetic.S32 and key.seed == 0 and case.label == SINGLE_TOKENS:
            feeds.append(Feed(case=case, name=f"{case.label} single", num_prompt=1, with_prompt_rows=False))
    return Scene(
        key=key,
        arithmetic=arithmetic,
        is_odd=True,
        feeds=tuple(feeds),
        again=tuple(_feed(case, " again") for case in again),
    )


def _scenes() -> Iterator[Scene]:
    for key in CHECKPOINTS:
        yield _whole(key, Arithmetic.S32)
        yield _odd(key, Arithmetic.S32)
        for arithmetic in (Arithmetic.Q32, Arithmetic.REF):
            yield _odd(key, arithmetic) if key.seed == 1 else _whole(key, arithmetic)


SCENES = tuple(scene for scene in _scenes() if scene.feeds)
S32 = [scene for scene in SCENES if scene.arithmetic is Arithmetic.S32]
ODD = [scene for scene in SCENES if scene.is_odd]
Results = Mapping[str, RunResult]


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    """All engines, in two children."""
    if not SCENES:
        pytest.skip("no golden prefill or decode file, neither in shared/golden nor in deepinfer_plugin/golden")
    return run_engines(
        [scene.engine_run(str(checkpoint(scene.key.name, scene.key.seed))) for scene in SCENES], num_children=2
    )


def _errors(scene: Scene, results: Results) -> list[RowErrors]:
    requests = results[scene.name].requests
    return [feed.errors(requests[feed.name]) for feed in (*scene.feeds, *scene.again)]


@pytest.mark.parametrize("scene", S32, ids=lambda scene: scene.name)
def test_every_row_agrees_in_s32(scene: Scene, results: Results) -> None:
    for errors in _errors(scene, results):
        errors.assert_s32()


@pytest.mark.parametrize("scene", ODD, ids=lambda scene: scene.name)
def test_long_prompts_came_in_odd_chunks(scene: Scene, results: Results) -> None:
    requests = results[scene.name].requests
    long = [requests[feed.name].facts for feed in scene.feeds if feed.num_prompt > ODD_BUDGET]
    assert long
    for facts in long:
        assert facts.num_cached_tokens > 0 or len(facts.chunks[0]) > 1
    sizes = [size for facts in long for size in facts.chunks[0]]
    assert any(size % 2 == 1 and size > 1 for size in sizes), sizes
    assert max(sizes) <= ODD_BUDGET


@pytest.mark.parametrize("scene", [scene for scene in ODD if scene.again], ids=lambda scene: scene.name)
def test_prompts_sent_again_hit_the_prefix_cache(scene: Scene, results: Results) -> None:
    requests = results[scene.name].requests
    for feed in scene.again:
        cached = requests[feed.name].facts.num_cached_tokens
        assert cached == (feed.num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE > 0, feed.name


def test_some_rows_were_fed_one_at_a_time(results: Results) -> None:
    single = [results[scene.name].requests[feed.name] for scene in S32 for feed in scene.feeds if feed.num_prompt == 1]
    assert max(len(result.tokens[0]) for result in single) >= 25
    assert all(set(result.facts.chunks[0]) == {1} for result in single)


@pytest.mark.parametrize("arithmetic", [Arithmetic.Q32, Arithmetic.REF], ids=lambda mode: mode.value)
def test_stable_rows_and_the_argmax_agree(arithmetic: Arithmetic, results: Results) -> None:
    scenes = [scene for scene in SCENES if scene.arithmetic is arithmetic]
    rows = RowErrors.join(arithmetic.value, [errors for scene in scenes for errors in _errors(scene, results)])
    stable, argmax = rows.stable_share(STABLE_ATOL[arithmetic]), rows.argmax_share()
    assert stable >= STABLE_SHARE[arithmetic], f"{stable:.4f} of the stable rows within {STABLE_ATOL[arithmetic]}"
    assert argmax >= ARGMAX_SHARE[arithmetic], f"argmax equal in {argmax:.4f} of {len(rows.error)} rows"
    if arithmetic is Arithmetic.REF:
        median = float(rows.error.median())
        assert median <= REF_MEDIAN, f"median of the row maxima is {median}"


def test_greedy_decode_chooses_the_recorded_tokens(results: Results) -> None:
    num_tokens = 0
    for scene in S32:
        for feed in scene.feeds:
            if feed.case.label.startswith("decode"):
                logits = results[scene.name].requests[feed.name].logits[0]
                chosen = feed.case.tokens[feed.num_prompt :]
                assert torch.equal(logits.argmax(dim=-1)[: len(chosen)], chosen), f"{scene.name} {feed.name}"
                num_tokens += len(chosen)
    assert num_tokens > 0
