"""The draft pass of the plain model against the golden drafts: logits, tokens and confidences in three arithmetics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.testing import assert_close, require_golden
from deepinfer_plugin.conftest import CheckpointFixture, ModelFixture
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.dspark import Draft, ReferenceDrafter, load_draft_weights
from deepinfer_plugin.reference.golden import (
    ARGMAX_SHARE,
    CHECKPOINTS,
    S32_ATOL,
    STABLE_ATOL,
    STABLE_SHARE,
    Checkpoint,
    find_golden,
)
from deepinfer_plugin.settings import Arithmetic

Tensors = dict[str, torch.Tensor]
Drafts = Callable[[Checkpoint, Arithmetic], list[Draft]]


@pytest.fixture(scope="module")
def drafts(checkpoint: CheckpointFixture, reference_model: ModelFixture) -> Drafts:
    """The drafts of every entry of a golden file, behind the anchors of the file."""

    def run(key: Checkpoint, arithmetic: Arithmetic) -> list[Draft]:
        golden = _load(key)
        tokens = golden["tokens"].long()
        trace: Tensors = {}
        reference_model(key, arithmetic).prefill(tokens, trace)
        folder = checkpoint(key.name, key.seed)
        config = ModelConfig.from_model_dir(folder)
        drafter = ReferenceDrafter(config, load_draft_weights(folder), arithmetic)
        found = []
        for entry, last in enumerate(golden["positions"].tolist()):
            cache = drafter.new_cache(tokens.shape[0] + config.dspark_block_size + 1)
            drafter.store_context(trace["main_hidden"][: last + 1], torch.arange(last + 1), cache)
            anchor = int(golden[f"draft.{arithmetic.value}"][entry, 0])
            found.append(drafter.draft(anchor, last, config.dspark_block_size, cache))
        return found

    return run


def _load(key: Checkpoint) -> Tensors:
    tensors: Tensors = load_file(require_golden(f"{key.folder}/dspark.safetensors"))
    return tensors


def _present() -> list[Checkpoint]:
    return [key for key in CHECKPOINTS if find_golden(f"{key.folder}/dspark.safetensors") is not None]


@pytest.mark.parametrize("key", CHECKPOINTS, ids=lambda key: key.folder)
def test_every_draft_agrees_in_s32(key: Checkpoint, drafts: Drafts) -> None:
    golden = _load(key)
    for entry, draft in enumerate(drafts(key, Arithmetic.S32)):
        label = f"{key.folder} entry {entry}"
        assert_close(draft.logits, golden["logits.s32"][entry], S32_ATOL, f"{label} logits")
        assert_close(draft.confidence, golden["confidence.s32"][entry], S32_ATOL, f"{label} confidence")
        assert draft.tokens.tolist() == golden["draft.s32"][entry, 1:].tolist(), label


def _rows(arithmetic: Arithmetic, drafts: Drafts) -> Iterator[tuple[float, bool, bool]]:
    """Of every entry of every file: largest error of its logits, whether it is stable, whether its tokens agree."""
    for key in _present():
        golden, mode = _load(key), arithmetic.value
        for entry, draft in enumerate(drafts(key, arithmetic)):
            error = float((draft.logits - golden[f"logits.{mode}"][entry]).abs().max())
            is_equal = draft.tokens.tolist() == golden[f"draft.{mode}"][entry, 1:].tolist()
            yield error, bool(golden[f"stable.{mode}"][entry]), is_equal


@pytest.mark.parametrize("arithmetic", [Arithmetic.Q32, Arithmetic.REF], ids=lambda mode: mode.value)
def test_stable_drafts_agree_with_quantisers(arithmetic: Arithmetic, drafts: Drafts) -> None:
    rows = list(_rows(arithmetic, drafts))
    assert rows, "no golden file of drafts, expected one"
    stable = [error for error, is_stable, _ in rows if is_stable]
    inside = sum(error <= STABLE_ATOL[arithmetic] for error in stable)
    assert inside / len(stable) >= STABLE_SHARE[arithmetic], f"{inside} of {len(stable)} stable drafts are inside"
    equal = sum(is_equal for _, _, is_equal in rows)
    assert equal / len(rows) >= ARGMAX_SHARE[arithmetic], f"{equal} of {len(rows)} drafts have equal tokens"
