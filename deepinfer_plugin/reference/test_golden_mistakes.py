"""Planted mistakes, each of which the ``s32`` rows must show: the golden tests have power (golden/README.md §6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from deepinfer_kernels.rope import cos_sin, inverse_frequencies, rope
from deepinfer_kernels.testing import require_golden
from deepinfer_plugin.conftest import ModelFixture, WeightsFixture
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.attention import ReferenceAttention
from deepinfer_plugin.reference.cache import RequestCache
from deepinfer_plugin.reference.golden import Checkpoint, GoldenCase, RowErrors, prefill_cases, run_chunks
from deepinfer_plugin.reference.model import Mix, ReferenceModel
from deepinfer_plugin.reference.step import Rotation, Step
from deepinfer_plugin.settings import Arithmetic

KEY = Checkpoint("tiny", 0)
Weights = Mapping[str, torch.Tensor]
Build = Callable[[ModelConfig, Weights], ReferenceModel]


class TransposedMix(ReferenceModel):
    def mix(self, layer: int, half: str, streams: torch.Tensor, step: Step) -> Mix:
        pre, post, comb = super().mix(layer, half, streams, step)
        return pre, post, comb.transpose(1, 2).contiguous()


class FreshPreMix(ReferenceModel):
    def block(
        self, layer: int, streams: torch.Tensor, pre: torch.Tensor, step: Step, cache: RequestCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().block(layer, streams, self.mix(layer, "attn", streams, step)[0], step, cache)


class NoSecondEngram(ReferenceModel):
    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic) -> None:
        super().__init__(config, weights, arithmetic)
        del self.engram[config.engram_layer_ids[-1]]


class NoCandidateFilter(ReferenceAttention):
    def select(
        self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache
    ) -> torch.Tensor:
        step.candidate_blocks = None
        return super().select(x, query_latent, rotation, step, cache)


class RotatedAtLastToken(ReferenceAttention):
    def entry_positions(self, entries: torch.Tensor) -> torch.Tensor:
        return super().entry_positions(entries) + self.ratio - 1


class NotRotatedBack(ReferenceAttention):
    def attend(self, query: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache) -> torch.Tensor:
        return rope(super().attend(query, rotation, step, cache), *rotation)


class PlainWindowKeys(ReferenceAttention):
    def write_window(self, x: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache) -> None:
        plain = inverse_frequencies(self.config.qk_rope_head_dim, self.config.rope_theta, None)
        super().write_window(x, cos_sin(step.positions, plain), step, cache)


class StaleSelection(ReferenceAttention):
    def select(
        self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache
    ) -> torch.Tensor:
        fresh = super().select(x, query_latent, rotation, step, cache)
        last = self.config.index_source_layer_ids[-1]
        return step.selections[self.config.index_source_layer_ids[-2]] if self.layer == last else fresh


class KeysLeftByTheLastSource(ReferenceAttention):
    """REF's decode defect: with an open pair the index keys are those that the last KV source left behind."""

    def index_scores(
        self, x: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache
    ) -> torch.Tensor:
        own = self.kv_source
        is_open = step.positions.shape[0] == 1 and int(step.positions[0]) % self.ratio != self.ratio - 1
        if is_open:
            self.kv_source = self.config.kv_source_layer_ids[-1]
        scores = super().index_scores(x, query_latent, rotation, step, cache)
        self.kv_source = own
        return scores


def _with_model(model_class: type[ReferenceModel]) -> Build:
    return lambda config, weights: model_class(config, weights, Arithmetic.S32)


def _with_attention(attention: type[ReferenceAttention]) -> Build:
    class Mistaken(ReferenceModel):
        attention_class = attention

    return _with_model(Mistaken)


def _with_config(**changes: int | float) -> Build:
    return lambda config, weights: ReferenceModel(replace(config, **changes), weights, Arithmetic.S32)  # type: ignore[arg-type]


def _scaled_sinks(config: ModelConfig, weights: Weights) -> ReferenceModel:
    scale = config.head_dim**-0.5
    scaled = {name: value * scale if name.endswith("attn_sink") else value for name, value in weights.items()}
    return ReferenceModel(config, scaled, Arithmetic.S32)


MISTAKES: dict[str, Build] = {
    "residual mix transposed": _with_model(TransposedMix),
    "attention pre-mix not lagged": _with_model(FreshPreMix),
    "second Engram layer skipped": _with_model(NoSecondEngram),
    "candidate filter ignored": _with_attention(NoCandidateFilter),
    "entries rotated at the last token": _with_attention(RotatedAtLastToken),
    "output not rotated back": _with_attention(NotRotatedBack),
    "window keys with the plain table": _with_attention(PlainWindowKeys),
    "last selector reuses the selection": _with_attention(StaleSelection),
    "window one shorter": _with_config(sliding_window=15),
    "index top-k one less": _with_config(index_topk=7),
    "one candidate block fewer": _with_config(candidate_topk_blocks=3),
    "routed_scaling_factor 1": _with_config(routed_scaling_factor=1.0),
    "sink times the softmax scale": _scaled_sinks,
}


@pytest.fixture(scope="module")
def case() -> GoldenCase:
    path = require_golden(f"{KEY.folder}/prefill.safetensors")
    return next(case for case in prefill_cases(path, KEY, Arithmetic.S32) if case.label.endswith("robust0"))


def _rows(model: ReferenceModel, case: GoldenCase, sizes: list[int]) -> RowErrors:
    return RowErrors.of(case, run_chunks(model, case.tokens, sizes)[case.rows])


def test_the_rows_agree_without_a_mistake(case: GoldenCase, reference_model: ModelFixture) -> None:
    _rows(reference_model(KEY, Arithmetic.S32), case, [case.tokens.shape[0]]).assert_s32()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_golden_rows_show_a_mistake(
    mistake: str, case: GoldenCase, reference_model: ModelFixture, text_weights: WeightsFixture
) -> None:
    mistaken = MISTAKES[mistake](reference_model(KEY, Arithmetic.S32).config, text_weights(KEY))
    errors = _rows(mistaken, case, [case.tokens.shape[0]])
    with pytest.raises(AssertionError, match="rows differ by more than"):
        errors.assert_s32()
    assert float((errors.error > 1e-3).float().mean()) > 0.5, f"{mistake} shows in few rows only"


def test_decode_shows_index_keys_of_another_source(
    case: GoldenCase, reference_model: ModelFixture, text_weights: WeightsFixture
) -> None:
    num_tokens = case.tokens.shape[0]
    build = _with_attention(KeysLeftByTheLastSource)
    mistaken = build(reference_model(KEY, Arithmetic.S32).config, text_weights(KEY))
    _rows(mistaken, case, [num_tokens]).assert_s32()  # a prefill cannot show it
    with pytest.raises(AssertionError, match="rows differ by more than"):
        _rows(mistaken, case, [1] * num_tokens).assert_s32()
