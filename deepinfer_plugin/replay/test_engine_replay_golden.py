"""Golden rows of bounded replay through vLLM's engine, where K and the hit are ones that an engine takes.

The grids with K = window are below what an engine accepts; the plain model runs those. Hits end at blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.reference.golden import STABLE_ATOL, STABLE_SHARE, Checkpoint, RowErrors, find_golden
from deepinfer_plugin.reference.golden_replay import KEYS, ReplayCase, replay_cases
from deepinfer_plugin.replay.settings import ALLOW_VARIABLE, ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

BLOCK = 32
ARITHMETICS = (Arithmetic.S32, Arithmetic.Q32)  # those that the file holds for K above the window
MODES = ("mask", "compact")


def _cases(key: Checkpoint, arithmetic: Arithmetic) -> list[ReplayCase]:
    path = find_golden(f"{key.folder}/replay.safetensors")
    if path is None:
        return []
    window = {"tiny": 16, "nano": 8}[key.name]
    found = replay_cases(path, key, arithmetic)
    return [one for one in found if one.keep_tokens > window and one.hit in (0, BLOCK)]


SCENES = [(key, arithmetic) for key in KEYS for arithmetic in ARITHMETICS if _cases(key, arithmetic)]


def _request(one: ReplayCase) -> Request:
    tokens = tuple(one.case.tokens.tolist())
    return Request(
        name=one.case.label,
        tokens=tokens[: one.case.num_prompt],
        forced=tokens[one.case.num_prompt :],
        sampling={"skip_reading_prefix_cache": one.hit == 0},  # the cold prompts begin alike
    )


def _actions(cases: list[ReplayCase]) -> list[Action]:
    """Cold cases together; a hit of one block behind a request that leaves just that block in the cache."""
    actions = [Action(add=tuple(_request(one) for one in cases if one.hit == 0))]
    for one in cases:
        if one.hit > 0:
            first = Request(name=f"{one.case.label} first", tokens=_request(one).tokens[: one.hit + 1], max_tokens=1)
            actions += [Action(reset_prefix_cache=True), Action(add=(first,)), Action(add=(_request(one),))]
    return actions


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    if not SCENES:
        pytest.skip("no golden replay file")
    runs = []
    for key, arithmetic in SCENES:
        cases = _cases(key, arithmetic)
        for mode in MODES:
            runs.append(
                EngineRun(
                    name=f"{key.folder} {arithmetic.value} {mode}",
                    model=str(checkpoint(key.name, key.seed)),
                    arithmetic=arithmetic,
                    flags=(f"--block-size={BLOCK}", "--max-num-batched-tokens=64"),
                    actions=tuple(_actions(cases)),
                    variables={
                        MODE_VARIABLE: mode,
                        KEEP_VARIABLE: str(cases[0].keep_tokens),
                        ENCODER_VARIABLE: "bounded",
                        ALLOW_VARIABLE: "1",
                    },
                )
            )
    return run_engines(runs, num_children=2)


def _errors(key: Checkpoint, arithmetic: Arithmetic, mode: str, results: Results) -> list[RowErrors]:
    run, found = results[f"{key.folder} {arithmetic.value} {mode}"], []
    for one in _cases(key, arithmetic):
        result = run.requests[one.case.label]
        limit = max(0, one.case.num_prompt - one.keep_tokens) // BLOCK * BLOCK
        assert result.facts.num_cached_tokens == min(one.hit, limit)
        if one.hit != result.facts.num_cached_tokens:
            continue  # the engine does not take this hit: it would cover rows of the decoder
        rows = one.case.rows >= one.case.num_prompt - 1  # the engine reports the prompt's last row and what follows
        found.append(RowErrors.of(one.case.only(rows), result.logits[0]))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "key", [key for key, arithmetic in SCENES if arithmetic is Arithmetic.S32], ids=lambda k: k.folder
)
def test_every_row_agrees_in_s32(key: Checkpoint, mode: str, results: Results) -> None:
    found = _errors(key, Arithmetic.S32, mode, results)
    assert found
    for errors in found:
        errors.assert_s32()


@pytest.mark.parametrize("mode", MODES)
def test_stable_rows_agree_in_q32(mode: str, results: Results) -> None:
    keys = [key for key, arithmetic in SCENES if arithmetic is Arithmetic.Q32]
    rows = RowErrors.join("q32", [errors for key in keys for errors in _errors(key, Arithmetic.Q32, mode, results)])
    assert rows.stable_share(STABLE_ATOL[Arithmetic.Q32]) >= STABLE_SHARE[Arithmetic.Q32]


def test_some_rows_came_behind_a_hit(results: Results) -> None:
    assert sum(run.facts.replay["bounded_hits"] for run in results.values()) > 0
    skipped = [run.facts.replay["skipped_decoder_rows"] for name, run in results.items() if name.endswith("compact")]
    assert min(skipped) > 0
