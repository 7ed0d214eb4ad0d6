"""However a prompt is cut into calls, every row keeps its bits, and stays inside the tolerance of the golden data."""

from __future__ import annotations

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal, require_golden
from deepinfer_plugin.conftest import ModelFixture
from deepinfer_plugin.reference.golden import (
    CHECKPOINTS,
    Checkpoint,
    RowErrors,
    cycled_sizes,
    prefill_cases,
    run_chunks,
)
from deepinfer_plugin.settings import Arithmetic

ODD_CYCLE = (3, 1, 7, 21, 2, 17, 1, 33)  # starts on odd and even positions, shorter and longer than the row tile
BITWISE_CYCLES = ((1,), ODD_CYCLE, (16,))
MAX_SHORT = 17  # longest prompt fed token by token although only its last rows are recorded
FED_SINGLY = ("robust0", "robust1", "seq0")  # and these, recorded at every row


@pytest.mark.parametrize("arithmetic", list(Arithmetic), ids=lambda mode: mode.value)
@pytest.mark.parametrize("key", [Checkpoint("tiny", 0), Checkpoint("nano", 0)], ids=lambda key: key.folder)
def test_every_row_keeps_its_bits_in_any_chunking(
    key: Checkpoint, arithmetic: Arithmetic, reference_model: ModelFixture
) -> None:
    path = require_golden(f"{key.folder}/prefill.safetensors")
    case = next(case for case in prefill_cases(path, key, arithmetic) if case.label.endswith("robust0"))
    model, num_tokens = reference_model(key, arithmetic), case.tokens.shape[0]
    whole = run_chunks(model, case.tokens, [num_tokens])
    for cycle in BITWISE_CYCLES:
        cut = run_chunks(model, case.tokens, cycled_sizes(num_tokens, cycle))
        assert_bitwise_equal(cut, whole, label=f"{case.label} in chunks of {cycle}")


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_every_row_agrees_in_s32_in_odd_chunks(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/prefill.safetensors")
    for case in prefill_cases(path, key, Arithmetic.S32):
        sizes = cycled_sizes(case.tokens.shape[0], ODD_CYCLE)
        logits = run_chunks(reference_model(key, Arithmetic.S32), case.tokens, sizes)
        RowErrors.of(case, logits[case.rows]).assert_s32()


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_every_row_agrees_in_s32_token_by_token(key: Checkpoint, reference_model: ModelFixture) -> None:
    path = require_golden(f"{key.folder}/prefill.safetensors")
    num_rows = 0
    for case in prefill_cases(path, key, Arithmetic.S32):
        num_tokens = case.tokens.shape[0]
        if num_tokens <= MAX_SHORT or case.label.endswith(FED_SINGLY):
            logits = run_chunks(reference_model(key, Arithmetic.S32), case.tokens, [1] * num_tokens)
            RowErrors.of(case, logits[case.rows]).assert_s32()
            num_rows += case.rows.shape[0]
    assert num_rows >= 36
