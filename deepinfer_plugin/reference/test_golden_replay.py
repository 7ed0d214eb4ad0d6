"""Bounded replay of the plain model against the golden P and H grids, and against its own properties (spec §3.8)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.testing import assert_bitwise_equal, require_golden
from deepinfer_plugin.conftest import ModelFixture
from deepinfer_plugin.reference.golden import (
    ARGMAX_SHARE,
    STABLE_ATOL,
    STABLE_SHARE,
    Checkpoint,
    RowErrors,
    find_golden,
)
from deepinfer_plugin.reference.golden_replay import KEYS, ReplayCase, replay_cases
from deepinfer_plugin.reference.replay import run_bounded_hit, run_replayed
from deepinfer_plugin.replay.window import ReplayRule
from deepinfer_plugin.settings import Arithmetic

NANO_WINDOW, NANO_ENCODER = 8, 4  # window and encoder layers of nano


def _errors(one: ReplayCase, reference_model: ModelFixture) -> RowErrors:
    case = one.case
    model = reference_model(case.checkpoint, case.arithmetic)
    logits = run_bounded_hit(model, case.tokens, case.num_prompt, one.keep_tokens, one.hit)
    first = case.tokens.shape[0] - logits.shape[0]
    return RowErrors.of(case, logits[case.rows - first])


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.folder)
def test_every_row_of_the_grids_agrees_in_s32(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/replay.safetensors")
    cases = list(replay_cases(path, key, Arithmetic.S32))
    assert any(one.hit > 0 for one in cases)
    for one in cases:
        _errors(one, reference_model).assert_s32()


@pytest.mark.parametrize("arithmetic", [Arithmetic.Q32, Arithmetic.REF], ids=lambda mode: mode.value)
def test_stable_rows_and_the_argmax_agree(arithmetic: Arithmetic, reference_model: ModelFixture) -> None:
    found = []
    for key in KEYS:
        path = find_golden(f"{key.folder}/replay.safetensors")
        if path is not None:
            found += [_errors(one, reference_model) for one in replay_cases(path, key, arithmetic)]
    if not found:
        pytest.skip("no golden replay file")
    rows = RowErrors.join(arithmetic.value, found)
    assert rows.stable_share(STABLE_ATOL[arithmetic]) >= STABLE_SHARE[arithmetic]
    assert rows.argmax_share() >= ARGMAX_SHARE[arithmetic]


def test_the_other_reading_of_the_cut_layer_is_told_apart(reference_model: ModelFixture) -> None:
    path = require_golden("nano-s0/replay.safetensors")
    tensors = load_file(path)
    one = next(c for c in replay_cases(path, KEYS[0], Arithmetic.S32) if c.case.num_prompt == 33 and c.hit == 0)
    other = tensors["P33.H0.logits_cut_untruncated.s32"]
    model = reference_model(KEYS[0], Arithmetic.S32)
    logits = run_bounded_hit(model, one.case.tokens, 33, NANO_WINDOW, 0)[one.case.rows]
    assert float((logits - other).abs().max()) > 0.1


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(count))


def test_entries_of_a_hit_are_not_rewritten(reference_model: ModelFixture) -> None:
    model = reference_model(KEYS[0], Arithmetic.REF)
    tokens, hit = _tokens(60), 32
    cache = model.new_cache(60)
    model.forward(tokens[:hit], cache)
    before = {i: (cache.compressed[i].clone(), cache.index_keys[i].clone()) for i in cache.compressed}
    windows = {i: cache.window[i].clone() for i in cache.window}
    model.replay_windows(cache, hit - NANO_WINDOW)
    for layer, (compressed, keys) in before.items():
        assert torch.equal(cache.compressed[layer], compressed)
        assert torch.equal(cache.index_keys[layer], keys)
    changed = [i for i in windows if not torch.equal(windows[i], cache.window[i])]
    assert changed == [1, 2, 3]  # layer 0 depends on the token alone, the decoder's windows are left alone


@pytest.mark.parametrize(("num_rows", "largest"), [(NANO_ENCODER * (NANO_WINDOW - 1), 1e-5), (16, None)])
def test_a_replay_as_long_as_the_error_front_is_exact(
    num_rows: int, largest: float | None, reference_model: ModelFixture
) -> None:
    model = reference_model(KEYS[0], Arithmetic.S32)
    tokens, hit = _tokens(64), 40
    exact = run_replayed(model, tokens, 64, ReplayRule(window=NANO_WINDOW))
    cache = model.new_cache(64)
    model.forward(tokens[:hit], cache)
    model.replay_windows(cache, hit - num_rows)
    off = float((model.forward(tokens[hit:], cache) - exact[hit:]).abs().max())
    assert off < largest if largest is not None else off > 1e-4


def test_a_replay_from_the_first_token_changes_nothing(reference_model: ModelFixture) -> None:
    model = reference_model(KEYS[0], Arithmetic.REF)
    tokens = _tokens(50)
    rule = ReplayRule(window=NANO_WINDOW, keep_tokens=20)
    cold = run_replayed(model, tokens, 50, rule)
    cache = model.new_cache(50)
    cache.decoder_floor = 30
    model.forward(tokens[:NANO_WINDOW], cache)
    model.replay_windows(cache, 0)
    assert_bitwise_equal(model.forward(tokens[NANO_WINDOW:], cache), cold[NANO_WINDOW:], label="rows after the replay")


@pytest.mark.parametrize("segment", [0, 16, 32])
def test_the_cut_into_calls_does_not_matter(segment: int, reference_model: ModelFixture) -> None:
    model = reference_model(KEYS[0], Arithmetic.REF)
    tokens = _tokens(90)
    rule = ReplayRule(window=NANO_WINDOW, keep_tokens=20, segment=segment)
    whole = run_replayed(model, tokens, 80, rule)
    for sizes in ([1] * 90, [33, 33, 24], [32, 48, 10]):
        assert_bitwise_equal(run_replayed(model, tokens, 80, rule, sizes)[60:], whole[60:], label=str(sizes[:3]))
