"""What the reference model refuses, and what its cache promises; its numbers are in the golden tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import ModelFixture, WeightsFixture
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.reference.golden import Checkpoint
from deepinfer_plugin.reference.model import ReferenceModel
from deepinfer_plugin.settings import Arithmetic

KEY = Checkpoint("nano", 0)


def test_a_request_that_outgrows_its_cache_is_refused(reference_model: ModelFixture) -> None:
    model = reference_model(KEY, Arithmetic.S32)
    cache = model.new_cache(4)
    model.forward(torch.tensor([0, 5, 6]), cache)
    with pytest.raises(ShapeError, match="2 ids after 3, expected at most 4 in total"):
        model.forward(torch.tensor([7, 8]), cache)
    assert cache.length == 3


def test_a_call_without_tokens_changes_nothing(reference_model: ModelFixture) -> None:
    model = reference_model(KEY, Arithmetic.REF)
    tokens = torch.tensor([0, 5, 6, 7, 8])
    whole = model.prefill(tokens)
    cache = model.new_cache(5)
    first = model.forward(tokens[:3], cache)
    assert model.forward(tokens[:0], cache).shape == (0, model.config.vocab_size)
    assert_bitwise_equal(torch.cat([first, model.forward(tokens[3:], cache)]), whole, "around an empty call")


@pytest.mark.parametrize("arithmetic", list(Arithmetic), ids=lambda mode: mode.value)
def test_capacity_changes_no_bit(arithmetic: Arithmetic, reference_model: ModelFixture) -> None:
    model = reference_model(KEY, arithmetic)
    tokens = torch.arange(41) % 11
    snug = model.forward(tokens, model.new_cache(41))
    assert_bitwise_equal(model.forward(tokens, model.new_cache(300)), snug, "capacity 300 against 41")


def test_a_compressed_vocabulary_needs_its_token_map(
    reference_model: ModelFixture, text_weights: WeightsFixture
) -> None:
    config = reference_model(KEY, Arithmetic.S32).config
    with pytest.raises(ConfigError, match=r"token_map is \[7\], expected \[256\]"):
        ReferenceModel(config, text_weights(KEY), Arithmetic.S32, torch.arange(7))
    compressed = replace(config, engram_compressed_vocab_size=200)
    with pytest.raises(ConfigError, match="token_map is None, expected"):
        ReferenceModel(compressed, text_weights(KEY), Arithmetic.S32)


def test_the_token_map_reaches_the_engram(reference_model: ModelFixture, text_weights: WeightsFixture) -> None:
    model = reference_model(KEY, Arithmetic.S32)
    token_map = torch.arange(model.config.vocab_size)
    token_map[9] = 5
    mapped = ReferenceModel(model.config, text_weights(KEY), Arithmetic.S32, token_map)
    rows = []
    for one, token in ((model, 5), (mapped, 5), (mapped, 9)):
        trace: dict[str, torch.Tensor] = {}
        one.prefill(torch.tensor([0, token, 6]), trace)
        rows.append(trace["engram_rows.L1"])
    assert_bitwise_equal(rows[1], rows[0], "identity on the other ids")
    assert_bitwise_equal(rows[2], rows[0], "9 mapped to 5")
