"""Images through vLLM's engine: the reference's logits, and bits that no neighbour, chunk, hit or replay moves.

All engines run in children. Prompts hold one placeholder per image; spans are wider than a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture, ModelFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.images.layout import ImageLayout, plan_layout
from deepinfer_plugin.images.preprocess import to_patches
from deepinfer_plugin.model.config import ModelConfig, VisionConfig
from deepinfer_plugin.reference import vision as oracle
from deepinfer_plugin.reference.golden import S32_ATOL, Checkpoint
from deepinfer_plugin.reference.model import load_vision_weights
from deepinfer_plugin.reference.pictures import Recipe, make_picture
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.images.faults"
BLOCK, NUM_OUTPUT, MARK = 32, 5, 254
A, B, SAME_SIZE = (1, 150, 90), (2, 90, 200), (3, 150, 90)  # recipes
CHUNKED = ("--max-num-batched-tokens=13", "--max-num-seqs=6")
WHOLE = ("--max-num-batched-tokens=512", "--max-num-seqs=8")
OFF = {MODE_VARIABLE: "off"}
SEGMENT = {MODE_VARIABLE: "compact", KEEP_VARIABLE: "20", ENCODER_VARIABLE: f"segment:{BLOCK}"}


def _request(name: str, *images: Recipe, lead: int = 9, between: int = 6, tail: int = 30) -> Request:
    """Text, then images with text between them, then text; the words depend on nothing but their place."""
    generator = torch.Generator().manual_seed(77)
    words = torch.randint(3, 250, (200,), generator=generator).tolist()
    tokens = words[:lead]
    for number, _ in enumerate(images):
        tokens += [MARK, *words[50 + number : 50 + number + between]]
    return Request(name=name, tokens=tuple(tokens + words[100 : 100 + tail]), images=images, max_tokens=NUM_OUTPUT)


def _text(name: str, length: int) -> Request:
    return Request(name=name, tokens=tuple(range(5, 5 + length)), max_tokens=NUM_OUTPUT)


PROBES = (
    _request("a", A),
    _request("b", B),
    _request("ab", A, B),
    _request("ba", B, A),
    _request("aa", A, A, between=0),  # spans that touch
    _request("last", A, tail=0),  # the span ends the prompt, n-grams of the answer meet it
    _request("twin", SAME_SIZE),
    _request("cut", A, lead=20, tail=5),
)


def _renamed(request: Request, suffix: str) -> Request:
    return Request(
        name=request.name + suffix, tokens=request.tokens, images=request.images, max_tokens=request.max_tokens
    )


def _alone() -> list[Action]:
    return [Action(add=(probe,)) for probe in PROBES]


def _crowd() -> list[Action]:
    return [Action(add=(_text("t", 40), *reversed(PROBES), _text("u", 3)))]


def _again() -> list[Action]:
    return [Action(add=PROBES), *(Action(add=(_renamed(probe, "@hit"),)) for probe in PROBES)]


def _engine(
    name: str,
    model: Path,
    actions: list[Action],
    *flags: str,
    arithmetic: Arithmetic = Arithmetic.S32,
    faults: tuple[str, ...] = (),
    variables: Mapping[str, str] = OFF,
) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=arithmetic,
        flags=(f"--block-size={BLOCK}", *flags),
        actions=tuple(actions),
        faults=tuple(f"{FAULTS}:{fault}" for fault in faults),
        variables=variables,
    )


def _runs(model: Path) -> list[EngineRun]:
    no_cache = "--no-enable-prefix-caching"
    text = [Action(add=(_text("t", 40), Request(name="mark", tokens=(5, MARK, 6, 7), max_tokens=NUM_OUTPUT)))]
    few = [Action(add=(PROBES[0], PROBES[1]))]
    return [
        _engine("alone", model, _alone(), no_cache, *WHOLE),
        _engine("crowd", model, _crowd(), *WHOLE),
        _engine("chunks", model, _crowd(), *CHUNKED),
        _engine("hits", model, _again(), *CHUNKED),
        _engine("ref alone", model, _alone(), no_cache, *WHOLE, arithmetic=Arithmetic.REF),
        _engine("ref chunks", model, _crowd(), *CHUNKED, arithmetic=Arithmetic.REF),
        _engine("segment cold", model, _alone(), no_cache, *WHOLE, variables=SEGMENT),
        _engine("segment hits", model, _again(), *CHUNKED, variables=SEGMENT),
        _engine("text with tower", model, text, *WHOLE),
        _engine("text only", model, text, *WHOLE, '--limit-mm-per-prompt={"image": 0}'),
        _engine("too many marks", model, [Action(add=(_extra_mark(), PROBES[0]))], *WHOLE),
        _engine("features_mixed_in_a_batch", model, few, *WHOLE, faults=("features_mixed_in_a_batch",)),
        _engine("spans_forgotten_behind_a_chunk", model, few, *CHUNKED, faults=("spans_forgotten_behind_a_chunk",)),
        _engine("ngrams_across_images", model, few, *WHOLE, faults=("ngrams_across_images",)),
        _engine(
            "replayed_rows_as_text", model, _again(), *CHUNKED, faults=("replayed_rows_as_text",), variables=SEGMENT
        ),
        _engine("images_known_by_size", model, _again(), *WHOLE, faults=("images_known_by_size",)),
    ]


def _extra_mark() -> Request:
    return Request(name="extra", tokens=(5, MARK, 6, MARK), images=(A,), max_tokens=1)


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    return run_engines(_runs(checkpoint("nano", 0)), num_children=2)


def _assert_same(results: Results, run: str, base: str, suffix: str = "") -> None:
    for probe in PROBES:
        name = probe.name + suffix
        if name in results[run].requests:
            got, want = results[run].requests[name], results[base].requests[probe.name]
            assert_bitwise_equal(got.logits[0], want.logits[0], f"{run} {name}")
            assert torch.equal(got.tokens[0], want.tokens[0])


def _first_difference(results: Results, run: str, base: str, suffix: str = "") -> list[str]:
    """Probes whose logits differ."""
    found = []
    for probe in PROBES:
        other = results[run].requests.get(probe.name + suffix)
        if other is not None and not torch.equal(other.logits[0], results[base].requests[probe.name].logits[0]):
            found.append(probe.name)
    return found


def test_answers_are_those_of_the_reference(
    results: Results, checkpoint: CheckpointFixture, reference_model: ModelFixture
) -> None:
    folder, model = checkpoint("nano", 0), reference_model(Checkpoint("nano", 0), Arithmetic.S32)
    config, weights = ModelConfig.from_model_dir(folder), load_vision_weights(folder)
    vision = config.vision_config
    assert vision is not None
    for probe in PROBES:
        tokens, spans = _expanded(probe, vision)
        result = results["alone"].requests[probe.name]
        fed = torch.cat([torch.tensor(tokens), result.tokens[0][:-1]])
        cache = model.new_cache(len(fed))
        for (start, layout), recipe in zip(spans, probe.images, strict=True):
            patches, _ = to_patches(make_picture(recipe), vision)
            grid = (layout.patches_high, layout.patches_wide)
            cells = oracle.features(oracle.tower(patches, grid, weights, vision), grid, weights, vision)
            cache.place_image(start, oracle.span(cells, grid, weights, vision).float())
        logits = model.forward(fed, cache)[len(tokens) - 1 :]
        want = torch.log_softmax(logits.double(), dim=-1)
        got = torch.log_softmax(result.logits[0].double(), dim=-1)
        assert float((got - want).abs().max()) < S32_ATOL, probe.name


def _expanded(probe: Request, vision: VisionConfig) -> tuple[list[int], list[tuple[int, ImageLayout]]]:
    tokens: list[int] = []
    spans = []
    recipes = iter(probe.images)
    for token in probe.tokens:
        if token != MARK:
            tokens.append(token)
            continue
        _, width, height = next(recipes)
        layout = plan_layout(width, height, vision)
        spans.append((len(tokens), layout))
        tokens += [MARK] * layout.num_tokens
    return tokens, spans


@pytest.mark.parametrize(("run", "base"), [("crowd", "alone"), ("chunks", "alone"), ("ref chunks", "ref alone")])
def test_neighbours_order_and_chunks_change_no_bit(results: Results, run: str, base: str) -> None:
    _assert_same(results, run, base)
    if run.endswith("chunks"):  # a span is longer than a chunk
        assert all(len(results[run].requests[probe.name].facts.chunks[0]) > 3 for probe in PROBES)


def test_hits_change_no_bit_also_where_they_end_inside_a_span(results: Results) -> None:
    _assert_same(results, "hits", "alone", "@hit")
    hits = {probe.name: results["hits"].requests[f"{probe.name}@hit"].facts.num_cached_tokens for probe in PROBES}
    assert sum(hit > 0 for hit in hits.values()) >= 5, hits
    assert hits["cut"] == BLOCK, hits  # inside the span, which takes 17 tokens from position 20 on


def test_replay_that_begins_inside_a_span_encodes_the_image_again(results: Results) -> None:
    _assert_same(results, "segment hits", "segment cold")
    _assert_same(results, "segment hits", "segment cold", "@hit")
    assert results["segment hits"].facts.replay["encoded_again"] > 0
    assert results["segment hits"].facts.replay["segment_hits"] > 0


def test_the_tower_changes_nothing_for_text_and_a_typed_placeholder_is_text(results: Results) -> None:
    for name in ("t", "mark"):
        with_tower, without = (results[run].requests[name].logits[0] for run in ("text with tower", "text only"))
        assert_bitwise_equal(with_tower, without, name)


def test_a_prompt_with_more_marks_than_images_is_refused_and_its_neighbour_keeps_its_bits(results: Results) -> None:
    error = results["too many marks"].requests["extra"].facts.error
    assert error is not None
    assert "holds 2 tokens" in error
    _assert_same(results, "too many marks", "alone")


@pytest.mark.parametrize(
    ("fault", "base", "suffix"),
    [
        ("features_mixed_in_a_batch", "alone", ""),
        ("spans_forgotten_behind_a_chunk", "alone", ""),
        ("ngrams_across_images", "alone", ""),
        ("replayed_rows_as_text", "segment cold", ""),
        ("images_known_by_size", "alone", "@hit"),
    ],
)
def test_a_planted_fault_would_show(results: Results, fault: str, base: str, suffix: str) -> None:
    assert results[fault].facts.fault_calls[f"{FAULTS}:{fault}"] > 0
    assert _first_difference(results, fault, base, suffix)
