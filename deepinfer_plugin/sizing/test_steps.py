"""Expected times: the figures of the slice and the published ones are met, and times move as they must."""

from __future__ import annotations

from itertools import pairwise

import pytest

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.sizing import figures, published, steps
from deepinfer_plugin.sizing.devices import GPUS
from deepinfer_plugin.sizing.figures import Curve
from deepinfer_plugin.sizing.published import ALONE, TOLERANCE, Point
from deepinfer_plugin.sizing.steps import DRAFTS, ENGRAM, EXCHANGE, EXPERTS, INDEX, Layout, StepModel

RELEASED = ModelConfig.from_dict(released_config_dict())
SLICE = published.slice_config()
H200 = GPUS["H200"]


def model(
    config: ModelConfig = RELEASED, gpu: str = "H200", layout: Layout = ALONE, keep: int | None = 140, drafts: int = 0
) -> StepModel:
    return StepModel(config=config, gpu=GPUS[gpu], layout=layout, keep_tokens=keep, num_drafts=drafts)


def test_decode_of_64_requests_on_the_slice_is_what_was_measured() -> None:
    rate = 64 / model(SLICE).decode(64, 256).total_us * 1e6
    assert rate == pytest.approx(15_545, rel=TOLERANCE)


def test_prefill_on_the_slice_is_what_was_measured() -> None:
    us = model(SLICE).prefill(4096, figures.SLICE_STEP_TOKENS, 8).total_us
    assert 8 * 4096 / us * 1e6 == pytest.approx(128_890, rel=TOLERANCE)


def test_every_published_figure_under_equal_assumptions_is_met() -> None:
    found = published.points()
    assert published.is_right(found)
    verdicts = {point.name: point.verdict for point in found}
    assert list(verdicts.values()).count("within") >= 20
    assert [point.name for point in found if point.verdict in ("differs", "not compared") and not point.why] == []
    assert sorted(name for name, verdict in verdicts.items() if verdict == "differs") == [
        "slice, decode 16 at 256, tokens/s",
        "slice, decode 16 at 65536, tokens/s",
        "slice, decode 64 at 65536, tokens/s",
        "windows and rings of a decoding request with drafts, bytes",
    ]


def test_a_figure_that_is_off_without_a_reason_is_wrong() -> None:
    off = Point(who="vendor", name="x", published=100.0, ours=126.0)
    assert off.verdict == "WRONG"
    assert not published.is_right([off])
    assert Point(who="vendor", name="x", published=100.0, ours=124.0).verdict == "within"


def test_a_check_notices_a_figure_that_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Curve(points=((1, 100.0), (64, 200.0), (4096, 3000.0)), source="planted")
    monkeypatch.setattr(figures, "QUERIES_KEYS_US", slow)
    assert not published.is_right(published.points())


def test_a_curve_goes_through_its_points_and_on_in_proportion() -> None:
    curve = Curve(points=((1, 10.0), (64, 20.0), (4096, 700.0)), source="test")
    assert [curve.at(rows) for rows in (0.5, 1, 64, 4096, 8192)] == pytest.approx([10.0, 10.0, 20.0, 700.0, 700.0])
    assert curve.time_at(8192) == pytest.approx(1400.0)
    values = [curve.time_at(rows) for rows in range(1, 10_000, 7)]
    assert all(low <= high for low, high in pairwise(values))


@pytest.mark.parametrize("layout", [ALONE, Layout(tensor=4, replicas=2, shares_experts=True)])
def test_more_requests_and_longer_contexts_never_take_less_time(layout: Layout) -> None:
    one = model(layout=layout)
    by_requests = [one.decode(requests, 4096).total_us for requests in (1, 8, 16, 17, 64, 200, 512)]
    by_context = [one.decode(16, context).total_us for context in (64, 256, 4096, 65536, 1 << 20)]
    by_prompt = [one.prefill(prompt, 8192).total_us for prompt in (100, 1000, 8192, 8193, 100_000)]
    for times in (by_requests, by_context, by_prompt):
        assert all(low <= high for low, high in pairwise(times))


def test_a_faster_card_is_never_slower() -> None:
    order = ["H100", "H200", "B200"]
    for times in (
        [model(gpu=gpu).decode(32, 4096).us[EXPERTS] for gpu in order],
        [model(gpu=gpu).prefill(8192, 8192).us[EXPERTS] for gpu in ("H20", "H200", "B200")],
    ):
        assert times == sorted(times, reverse=True)


def test_ranks_share_experts_and_pay_for_the_exchange() -> None:
    alone, eight = model(), model(layout=Layout(tensor=8, replicas=1, shares_experts=False))
    assert eight.decode(64, 4096).us[EXPERTS] < alone.decode(64, 4096).us[EXPERTS] / 4
    assert EXCHANGE not in alone.decode(64, 4096).us
    assert eight.decode(64, 4096).us[EXCHANGE] > 0


def test_ranks_that_cut_every_expert_do_not_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Layout(tensor=8, replicas=1, shares_experts=False)
    dealt = Layout(tensor=4, replicas=2, shares_experts=True)
    before = [model(layout=layout).decode(64, 4096).us[EXPERTS] for layout in (cut, dealt)]
    monkeypatch.setattr(steps, "DECODE_IMBALANCE", 2 * steps.DECODE_IMBALANCE)
    after = [model(layout=layout).decode(64, 4096).us[EXPERTS] for layout in (cut, dealt)]
    assert after == pytest.approx([before[0], 2 * before[1]])


def test_bounded_replay_halves_a_long_prefill() -> None:
    compact, every_row = model().prefill(65536, 8192), model(keep=None).prefill(65536, 8192)
    assert 0.4 < compact.total_us / every_row.total_us < 0.65


def test_a_chunk_keeps_the_rows_that_belong_to_the_end_of_the_prompt() -> None:
    one = model()
    for prompt, step in ((1000, 128), (1000, 300), (140, 128), (50, 128), (129, 128)):
        kept = [one._kept(prompt, start, min(step, prompt - start)) for start in range(0, prompt, step)]
        assert sum(kept) == min(prompt, 140)


def test_only_operations_that_were_timed_call_themselves_measured() -> None:
    alone, cut, other = model(), model(layout=Layout(tensor=8, replicas=1, shares_experts=False)), model(gpu="B200")
    assert {alone.source_of(part) for part in (EXPERTS, INDEX)} == {"measured"}
    assert {one.source_of(part) for one in (alone, cut, other) for part in (ENGRAM, DRAFTS, EXCHANGE)} == {"estimate"}
    assert (cut.source_of(EXPERTS), cut.source_of(INDEX), other.source_of(INDEX)) == (
        "estimate",
        "measured",
        "estimate",
    )


def test_drafts_take_time_in_a_step_and_are_part_of_it() -> None:
    plain, drafting = model().decode(16, 4096), model(drafts=3).decode(16, 4096)
    assert DRAFTS not in plain.us
    assert drafting.us[DRAFTS] > 0
    assert drafting.total_us > plain.total_us
