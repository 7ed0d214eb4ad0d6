"""Whole sequences against the golden logits: prefill, greedy decode and the limited SwiGLU, in three arithmetics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.testing import assert_close, require_golden
from deepinfer_plugin.conftest import ModelFixture
from deepinfer_plugin.reference.golden import (
    ARGMAX_SHARE,
    CHECKPOINTS,
    LIMITED,
    REF_MEDIAN,
    S32_ATOL,
    STABLE_ATOL,
    STABLE_SHARE,
    Checkpoint,
    GoldenCase,
    RowErrors,
    all_cases,
    decode_cases,
    lowest_argmax,
    prefill_cases,
    run_case,
)
from deepinfer_plugin.settings import Arithmetic

Pool = Callable[[Arithmetic], RowErrors]


def _fail_unless_all_rows_are_inside(cases: list[GoldenCase], reference_model: ModelFixture) -> None:
    assert cases
    for case in cases:
        run_case(reference_model(case.checkpoint, case.arithmetic), case).assert_s32()


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_every_prefill_row_agrees_in_s32(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/prefill.safetensors")
    _fail_unless_all_rows_are_inside(prefill_cases(path, key, Arithmetic.S32), reference_model)


def test_every_row_agrees_in_s32_where_the_swiglu_clamps(reference_model: ModelFixture) -> None:
    path = require_golden(f"{LIMITED.folder}/swiglu_limit_0.5.safetensors")
    _fail_unless_all_rows_are_inside(prefill_cases(path, LIMITED, Arithmetic.S32), reference_model)


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_greedy_decode_chooses_the_recorded_tokens_in_s32(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/decode.safetensors")
    cases = decode_cases(path, key, Arithmetic.S32)
    assert cases
    model = reference_model(key, Arithmetic.S32)
    for case in cases:
        cache = model.new_cache(case.tokens.shape[0])
        rows = [model.forward(case.tokens[: case.num_prompt], cache)[-1:]]
        while cache.length < case.tokens.shape[0]:
            chosen = lowest_argmax(rows[-1])
            assert chosen.item() == case.tokens[cache.length].item(), f"{case.label}: token {cache.length}"
            rows.append(model.forward(chosen, cache))
        RowErrors.of(case, torch.cat(rows)).assert_s32()


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_drafter_taps_agree_in_s32(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/prefill.safetensors")
    tensors = load_file(path)
    if "seq0.main_hidden.s32" not in tensors:
        pytest.skip(f"{key.folder}/prefill.safetensors holds no seq0.main_hidden.s32 (golden subset)")
    trace: dict[str, torch.Tensor] = {}
    reference_model(key, Arithmetic.S32).prefill(tensors["seq0.tokens"], trace)
    assert_close(trace["main_hidden"], tensors["seq0.main_hidden.s32"], S32_ATOL, f"{key.folder} main_hidden")


@pytest.fixture(scope="module")
def pool(reference_model: ModelFixture) -> Pool:
    """The rows of all golden files in one arithmetic, computed once."""
    pools: dict[Arithmetic, RowErrors] = {}

    def rows(arithmetic: Arithmetic) -> RowErrors:
        if arithmetic not in pools:
            cases = list(all_cases(arithmetic))
            if not cases:
                pytest.skip("no golden prefill or decode file, neither in shared/golden nor in deepinfer_plugin/golden")
            pools[arithmetic] = RowErrors.join(
                arithmetic.value, [run_case(reference_model(case.checkpoint, arithmetic), case) for case in cases]
            )
        return pools[arithmetic]

    return rows


@pytest.mark.parametrize("arithmetic", [Arithmetic.Q32, Arithmetic.REF], ids=lambda mode: mode.value)
def test_stable_rows_of_all_files_agree(arithmetic: Arithmetic, pool: Pool) -> None:
    share = pool(arithmetic).stable_share(STABLE_ATOL[arithmetic])
    assert share >= STABLE_SHARE[arithmetic], f"{share:.4f} of the stable rows within {STABLE_ATOL[arithmetic]}"


@pytest.mark.parametrize("arithmetic", [Arithmetic.Q32, Arithmetic.REF], ids=lambda mode: mode.value)
def test_argmax_of_all_rows_agrees_often_enough(arithmetic: Arithmetic, pool: Pool) -> None:
    share = pool(arithmetic).argmax_share()
    assert share >= ARGMAX_SHARE[arithmetic], f"argmax equal in {share:.4f} of the rows"


def test_the_median_row_of_ref_is_near(pool: Pool) -> None:
    assert float(pool(Arithmetic.REF).error.median()) <= REF_MEDIAN
