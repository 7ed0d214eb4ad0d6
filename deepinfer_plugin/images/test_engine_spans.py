"""Spans that are cut: by a chunk border at every offset, and by preemption; and images that come more than once.

Prompts hold one placeholder per image. Borders are tried in s32, whose bits no rounding hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.images.layout import plan_layout
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.pictures import Recipe
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.images.faults"
BLOCK, MARK, SPAN = 32, 254, 17
SMALL, LARGE, OTHER_LARGE = (1, 150, 90), (5, 400, 400), (6, 400, 400)  # recipes
OFF = {MODE_VARIABLE: "off"}
SEGMENT = {MODE_VARIABLE: "compact", KEEP_VARIABLE: "20", ENCODER_VARIABLE: f"segment:{BLOCK}"}
NO_CACHE = "--no-enable-prefix-caching"
BUDGET = 64  # of the steps whose borders are moved


def _text(count: int, first: int = 5) -> tuple[int, ...]:
    return tuple(first + 7 * number % 200 for number in range(count))


def _request(name: str, lead: int, *images: Recipe, tail: int = 8, max_tokens: int = 2, priority: int = 0) -> Request:
    tokens = (*_text(lead), *[MARK] * len(images), *_text(tail, first=9))
    return Request(name=name, tokens=tokens, images=images, max_tokens=max_tokens, priority=priority)


ONE, TWO = _request("one", 9, SMALL), _request("two", 5, SMALL, SMALL, tail=6)
BORDERS = {"one": range(8, 9 + SPAN + 3), "two": range(4, 5 + 2 * SPAN + 3)}  # from before a span to behind it


def _renamed(request: Request, suffix: str) -> Request:
    return replace(request, name=f"{request.name}@{suffix}")


def _at_border(request: Request, border: int) -> Action:
    """A neighbour takes so much of the step that the request's first chunk ends at ``border``."""
    neighbour = Request(name=f"n {request.name} {border}", tokens=_text(BUDGET - border), max_tokens=1)
    return Action(add=(neighbour, _renamed(request, str(border))))


def _engine(
    name: str,
    model: Path,
    actions: list[Action],
    *flags: str,
    fault: str = "",
    arithmetic: Arithmetic = Arithmetic.S32,
    variables: Mapping[str, str] = OFF,
) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=arithmetic,
        flags=(f"--block-size={BLOCK}", *flags),
        actions=tuple(actions),
        faults=(f"{FAULTS}:{fault}",) if fault else (),
        variables=variables,
    )


LEAD = 70
WATCHED = _request("watched", LEAD, LARGE, tail=12, max_tokens=6, priority=1)
PRESSED = (
    *("--num-gpu-blocks-override=66", "--max-model-len=128", "--max-num-batched-tokens=8", "--max-num-seqs=8"),
    "--scheduling-policy=priority",
)


def _replaying(name: str, model: Path, actions: list[Action], *flags: str, fault: str = "") -> EngineRun:
    return _engine(name, model, actions, *flags, fault=fault, arithmetic=Arithmetic.REF, variables=SEGMENT)


def _pressed() -> list[Action]:
    """Four urgent requests decode; the watched one grows by the rest of every step until they need its blocks."""
    urgent = tuple(Request(name=f"o{i}", tokens=_text(25 + i, first=3 + i), max_tokens=60) for i in range(4))
    return [Action(add=urgent, steps=2), Action(add=(WATCHED,))]


def _repeated() -> list[Action]:
    """The small image in three requests, then large ones that push it out of the encoder's cache, then again."""
    twice = _request("twice", 9, SMALL, SMALL)
    large = [_request("large", 9, LARGE), _request("other large", 9, OTHER_LARGE)]
    requests = [ONE, _renamed(ONE, "kept"), twice, _renamed(twice, "kept"), *large, _renamed(ONE, "evicted")]
    return [Action(add=(request,)) for request in requests]


NUM_ENCODED = 4  # SMALL, LARGE, OTHER_LARGE, and SMALL once more


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture) -> Results:
    model = checkpoint("nano", 0)
    moved = [_at_border(request, border) for request in (ONE, TWO) for border in BORDERS[request.name]]
    alone = [Action(add=(request,)) for request in (ONE, TWO)]
    steps = f"--max-num-batched-tokens={BUDGET}"  # also the tokens of images that the encoder's cache holds
    runs = [
        _engine("borders", model, alone + moved, NO_CACHE, steps),
        _engine("repeated", model, _repeated(), NO_CACHE, steps, fault="images_counted"),
        _engine("shifted", model, [_at_border(ONE, 17)], NO_CACHE, steps, fault="span_shifted_at_a_chunk_border"),
        _replaying("alone", model, [Action(add=(WATCHED,))], NO_CACHE),
        _replaying("pressed", model, _pressed(), NO_CACHE, *PRESSED),
        _replaying("pressed, cached", model, _pressed(), *PRESSED),
        _replaying("lost", model, _pressed(), NO_CACHE, *PRESSED, fault="spans_lost_after_preemption"),
    ]
    return run_engines(runs, num_children=2)


@pytest.mark.parametrize("request_", [ONE, TWO], ids=lambda request: request.name)
def test_a_border_at_any_offset_of_a_span_changes_no_bit(request_: Request, results: Results) -> None:
    found = results["borders"].requests
    want = found[request_.name]
    assert len(want.facts.chunks[0]) == request_.max_tokens  # one chunk, then a token at a time
    for border in BORDERS[request_.name]:
        got = found[f"{request_.name}@{border}"]
        assert got.facts.chunks[0][0] == border
        assert_bitwise_equal(got.logits[0], want.logits[0], f"{request_.name} cut at {border}")


def test_an_image_that_comes_again_is_encoded_once_while_it_is_kept(results: Results) -> None:
    found = results["repeated"].requests
    assert results["repeated"].facts.fault_calls[f"{FAULTS}:images_counted"] == NUM_ENCODED
    for name, suffix in (("one", "kept"), ("one", "evicted"), ("twice", "kept")):
        assert_bitwise_equal(found[f"{name}@{suffix}"].logits[0], found[name].logits[0], f"{name} {suffix}")
    assert_bitwise_equal(found["one"].logits[0], results["borders"].requests["one"].logits[0], "another engine")


@pytest.mark.parametrize("run", ["pressed", "pressed, cached"])
def test_a_request_preempted_inside_a_span_keeps_its_bits(
    run: str, results: Results, checkpoint: CheckpointFixture
) -> None:
    vision = ModelConfig.from_model_dir(checkpoint("nano", 0)).vision_config
    assert vision is not None
    length = plan_layout(LARGE[1], LARGE[2], vision).num_tokens
    got, want = results[run].requests["watched"], results["alone"].requests["watched"]
    assert got.facts.num_preemptions == 1
    num_rows = len(WATCHED.tokens) - 1 + length + 6 - 1
    progress = sum(got.facts.chunks[0]) + results[run].facts.replay["hit_rows"] - num_rows
    assert LEAD < progress < LEAD + length
    assert_bitwise_equal(got.logits[0], want.logits[0], run)


def test_planted_faults_would_show(results: Results) -> None:
    for run, name, base, request, fault in (
        ("shifted", "one@17", "borders", "one", "span_shifted_at_a_chunk_border"),
        ("lost", "watched", "alone", "watched", "spans_lost_after_preemption"),
    ):
        assert results[run].facts.fault_calls[f"{FAULTS}:{fault}"] > 0
        want = results[base].requests[request].logits[0]
        assert not results[run].requests[name].logits[0].equal(want), fault
