"""Rows, floors, limits and pieces against one-line definitions over every position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings, TruncationMode
from deepinfer_plugin.replay.window import Chunk, ReplayRule, is_border, pieces, visible

LENGTHS = st.integers(1, 90)


@given(position=st.integers(0, 80), window=st.integers(1, 20), floor=st.integers(0, 90))
def test_a_row_sees_the_window_above_its_floor(position: int, window: int, floor: int) -> None:
    expected = [j for j in range(200) if position - window < j <= position and j >= floor]
    assert list(visible(position, window, floor)) == expected


@given(num_prompt=LENGTHS, keep=st.integers(9, 60))
def test_the_decoder_keeps_the_last_rows_of_the_prompt(num_prompt: int, keep: int) -> None:
    floor = ReplayRule(window=8, keep_tokens=keep).decoder_floor(num_prompt)
    assert [p for p in range(num_prompt) if p >= floor] == list(range(num_prompt))[-keep:]


def test_without_replay_no_row_is_left_out_and_no_hit_is_limited() -> None:
    rule = ReplayRule(window=8)
    assert rule.decoder_floor(1000) == 0
    assert rule.hit_limit(1000) is None


def test_a_request_that_needs_every_row_has_no_floor_and_no_hit() -> None:
    rule = ReplayRule(window=8, keep_tokens=20)
    assert rule.decoder_floor(100, needs_every_row=True) == 0
    assert rule.hit_limit(100, needs_every_row=True) == 0


@given(num_prompt=LENGTHS, keep=st.integers(9, 60), segment=st.sampled_from([0, 4, 32]), replays=st.booleans())
def test_a_hit_leaves_every_kept_row_to_be_computed(num_prompt: int, keep: int, segment: int, replays: bool) -> None:
    rule = ReplayRule(window=8, keep_tokens=keep, backtracking=1, segment=segment, replays_hits=replays)
    limit = rule.hit_limit(num_prompt)
    floor = rule.decoder_floor(num_prompt)
    allowed = [
        length
        for length in range(floor + 1)
        if (segment == 0 or length % segment == 0) and (not replays or length <= max(0, num_prompt - 9))
    ]
    assert limit == max(allowed)


def test_the_vendors_numbers_give_the_vendors_limit() -> None:
    settings = ReplaySettings(keep_tokens=134, encoder=EncoderPolicy(kind="bounded"), allow_approximate=True)
    rule = ReplayRule.from_settings(settings, window=128, num_drafts=5)
    assert rule.backtracking == 6
    assert [rule.hit_limit(length) for length in (1, 134, 135, 255, 256, 1000)] == [0, 0, 1, 121, 122, 866]


def test_the_modes_become_rules() -> None:
    off, mask, compact = (
        ReplayRule.from_settings(ReplaySettings(mode=mode), window=128, num_drafts=0)
        for mode in (TruncationMode.OFF, TruncationMode.MASK, TruncationMode.COMPACT)
    )
    assert (off.keep_tokens, mask.keep_tokens, compact.keep_tokens) == (None, 140, 140)
    assert (off.drops_rows, mask.drops_rows, compact.drops_rows) == (False, False, True)


@given(
    start=st.integers(0, 70),
    length=st.integers(1, 60),
    window=st.integers(1, 20),
    segment=st.integers(1, 40),
)
def test_pieces_hold_the_chunk_and_replay_a_window_before_every_border(
    start: int, length: int, window: int, segment: int
) -> None:
    rule = ReplayRule(window=window, keep_tokens=50, segment=segment)
    chunk = Chunk(start=start, stop=start + length, num_prompt=200)
    found = pieces(chunk, rule)
    assert [p for piece in found for p in range(piece.first, piece.stop)] == list(range(start, start + length))
    borders = [p for p in range(start, start + length) if p > 0 and p % segment == 0]
    assert [p for p in range(start, start + length) if is_border(p, chunk, rule)] == borders
    replayed = {piece.first: (piece.start, piece.floor) for piece in found if piece.start < piece.first}
    assert replayed == {b: (max(0, b - window), max(0, b - window)) for b in borders}
    assert all(piece.floor == 0 for piece in found if piece.start == piece.first)


def test_a_bounded_hit_replays_its_last_window_once() -> None:
    rule = ReplayRule(window=8, keep_tokens=20, replays_hits=True)
    (piece,) = pieces(Chunk(start=64, stop=80, num_prompt=100, hit=64), rule)
    assert (piece.start, piece.first, piece.stop, piece.floor) == (56, 64, 80, 56)
    (later,) = pieces(Chunk(start=80, stop=90, num_prompt=100, hit=64), rule)
    assert later.start == later.first == 80
