"""What an answer says about its replay, what is counted, and what a cached prefix costs."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_plugin.cache.records import KVRecords
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.replay import counters, memory
from deepinfer_plugin.replay.plan import plan_step
from deepinfer_plugin.replay.requests import describe, needs_every_row
from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings, TruncationMode
from deepinfer_plugin.replay.window import Chunk, ReplayRule
from deepinfer_plugin.settings import Arithmetic


class _Params:
    """The two fields of vLLM's SamplingParams that count."""

    def __init__(self, prompt_logprobs: int | None = None, prompt_logprob_token_ids: object = None) -> None:
        self.prompt_logprobs = prompt_logprobs
        self.prompt_logprob_token_ids = prompt_logprob_token_ids


PLAIN, WITH_ROWS = _Params(), _Params(prompt_logprobs=0)


def test_prompt_log_probabilities_need_every_row() -> None:
    assert not needs_every_row(None)
    assert not needs_every_row(PLAIN)
    assert needs_every_row(WITH_ROWS)
    assert needs_every_row(_Params(prompt_logprob_token_ids=[[1]]))


def test_an_answer_says_which_rows_were_computed() -> None:
    found = describe(ReplaySettings(), 1000, PLAIN)
    assert found == {
        "decoder": "compact",
        "reason": "",
        "keep_tokens": 140,
        "first_decoder_row": 860,
        "encoder": "exact",
        "is_approximate": False,
    }


def test_an_answer_says_why_its_prompt_was_not_cut() -> None:
    found = describe(ReplaySettings(), 1000, WITH_ROWS)
    assert (found["decoder"], found["first_decoder_row"]) == ("off", 0)
    assert found["reason"] == "prompt log-probabilities need every row"
    off = describe(ReplaySettings(mode=TruncationMode.OFF), 1000, WITH_ROWS)
    assert (off["decoder"], off["reason"]) == ("off", "")


def test_an_answer_says_that_it_is_approximate() -> None:
    settings = ReplaySettings(encoder=EncoderPolicy(kind="bounded"), allow_approximate=True)
    assert describe(settings, 10, PLAIN)["is_approximate"] is True


def test_steps_and_requests_are_counted() -> None:
    before = counters.snapshot()
    rule = ReplayRule(window=8, keep_tokens=20, drops_rows=True, segment=32)
    counters.count_step(
        plan_step([Chunk(start=0, stop=50, num_prompt=60), Chunk(start=70, stop=71, num_prompt=60)], rule)
    )
    counters.count_request("segment", 32, is_unreplayed=False)
    counters.count_request("exact", 0, is_unreplayed=True)
    counters.count_encoded_again()
    found = counters.since(before)
    assert found == {
        "steps": 1,
        "rows": 51,
        "decoder_rows": 11,
        "skipped_decoder_rows": 40,
        "replayed_encoder_rows": 8,
        "exact_hits": 0,
        "segment_hits": 1,
        "bounded_hits": 0,
        "hit_rows": 32,
        "unreplayed_requests": 1,
        "encoded_again": 1,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.steps = 7  # type: ignore[misc]


def test_costs_count_the_bytes_of_the_records() -> None:
    config = ModelConfig.from_dict(released_config_dict())
    records = KVRecords.from_model(config, Arithmetic.REF)
    assert memory.window_record_bytes(config.head_dim) == records.window_bytes == 528
    assert memory.growing_bytes_per_token(config) == records.growing_bytes_per_token(config) == 890


def test_the_three_policies_cost_what_they_keep() -> None:
    config = ModelConfig.from_dict(released_config_dict())
    exact, segment, bounded = (
        memory.prefix_cost(config, EncoderPolicy.parse(text)) for text in ("exact", "segment:4096", "bounded")
    )
    assert exact.window_bytes_per_boundary == 20 * 128 * 528
    assert exact.bytes_per_token == 890 + 20 * 528
    assert (segment.bytes_per_token, bounded.bytes_per_token) == (890, 890)
    assert (exact.replayed_rows_per_hit, segment.replayed_rows_per_hit, bounded.replayed_rows_per_hit) == (0, 128, 128)
    assert (segment.boundary_tokens, segment.replayed_rows_per_boundary) == (4096, 128)
    assert "890 B per cached token" in segment.to_text()
