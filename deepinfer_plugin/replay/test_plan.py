"""Plans of steps against a slow oracle that follows every window key through the passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_plugin.replay.plan import EncoderPass, StepPlan, plan_decode, plan_step
from deepinfer_plugin.replay.window import Chunk, ReplayRule, visible

WINDOW = 6
Version = tuple[str, int]  # ("plain", 0), or ("replayed before", border)
Windows = dict[int, Version]


@st.composite
def rules(draw: st.DrawFn) -> ReplayRule:
    keep = draw(st.one_of(st.none(), st.integers(WINDOW + 1, 30)))
    segment = draw(st.sampled_from([0, 4, 8, 20])) if keep is not None else 0
    return ReplayRule(window=WINDOW, keep_tokens=keep, drops_rows=draw(st.booleans()), segment=segment)


@st.composite
def lives(draw: st.DrawFn, rule: ReplayRule) -> list[Chunk]:
    """All chunks of a request: a prompt, generated tokens, a hit, perhaps a preemption in between."""
    num_prompt = draw(st.integers(1, 70))
    total = num_prompt + draw(st.integers(0, 12))
    needs_every_row = draw(st.sampled_from([False, False, False, True]))
    chunks: list[Chunk] = []
    for end in draw(st.sampled_from([[total], [draw(st.integers(1, total)), total]])):
        limit = rule.hit_limit(num_prompt, needs_every_row=needs_every_row)
        hit = draw(st.integers(0, max(0, min(num_prompt - 1 if limit is None else limit, end - 1))))
        hit -= hit % (rule.segment or 1)
        start = hit
        while start < end:
            stop = min(end, start + draw(st.integers(1, 40)))
            chunks.append(
                Chunk(start=start, stop=stop, num_prompt=num_prompt, hit=hit, needs_every_row=needs_every_row)
            )
            start = stop
    return chunks


@st.composite
def steps(draw: st.DrawFn) -> tuple[ReplayRule, list[list[Chunk]]]:
    """Steps that hold the next chunk of each of a few requests at different phases."""
    rule = draw(rules())
    requests = [draw(lives(rule)) for _ in range(draw(st.integers(1, 4)))]
    found = []
    while any(requests):
        takes_part = [draw(st.booleans()) for _ in requests]
        left = [r for r in requests if r]
        chosen = [r for r, takes in zip(requests, takes_part, strict=True) if r and takes] or left[:1]
        found.append([r.pop(0) for r in chosen])
    return rule, found


def expected_decoder_rows(chunks: Sequence[Chunk], rule: ReplayRule) -> list[tuple[int, int]]:
    """(request, position) of every row that is not before the last rows of its prompt."""
    found = []
    for request, chunk in enumerate(chunks):
        for position in range(chunk.start, chunk.stop):
            is_cut = rule.keep_tokens is not None and not chunk.needs_every_row
            if not is_cut or position >= chunk.num_prompt - (rule.keep_tokens or 0):
                found.append((request, position))
    return found


def all_rows(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    return [(i, p) for i, chunk in enumerate(chunks) for p in range(chunk.start, chunk.stop)]


@given(steps())
def test_the_decoder_computes_the_kept_rows_and_no_other(case: tuple[ReplayRule, list[list[Chunk]]]) -> None:
    rule, plans = case
    for chunks in plans:
        plan = plan_step(chunks, rule)
        rows = all_rows(chunks)
        assert plan.num_rows == len(rows)
        kept = rows if plan.decoder_rows is None else [rows[i] for i in plan.decoder_rows]
        assert kept == (expected_decoder_rows(chunks, rule) if rule.drops_rows else rows)
        assert plan.num_decoder_rows == len(kept)
        if rule.drops_rows:
            assert all(position >= plan.decoder_floors[request] for request, position in kept)


@given(steps())
def test_floors_follow_the_prompt_alone(case: tuple[ReplayRule, list[list[Chunk]]]) -> None:
    rule, plans = case
    for chunks in plans:
        for chunk, floor in zip(chunks, plan_step(chunks, rule).decoder_floors, strict=True):
            is_cut = rule.keep_tokens is not None and not chunk.needs_every_row
            assert floor == (max(0, chunk.num_prompt - (rule.keep_tokens or 0)) if is_cut else 0)


def run_pass(one: EncoderPass, windows: dict[int, Windows], seen: dict[tuple[int, int], list[Version]]) -> None:
    """What a layer does: all rows of the pass write their window key, then all rows read."""
    rows = list(zip(one.source_rows, one.requests, one.positions, one.floors, strict=True))
    for source, request, position, floor in rows:
        border = int(floor) + WINDOW
        windows[int(request)][int(position)] = ("replayed before", border) if source < 0 else ("plain", 0)
    for source, request, position, floor in rows:
        if source >= 0:
            keys = [windows[int(request)].get(j, ("missing", j)) for j in visible(int(position), WINDOW, int(floor))]
            seen[int(request), int(position)] = keys


def plain_pass(chunks: Sequence[Chunk]) -> EncoderPass:
    rows = all_rows(chunks)
    requests, positions = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return EncoderPass(
        source_rows=np.arange(len(rows)), requests=requests, positions=positions, floors=np.zeros_like(positions)
    )


def expected_keys(position: int, rule: ReplayRule) -> list[Version]:
    """Keys before the last border at or before the row are replayed ones, the others plain."""
    border = position - position % rule.segment if rule.segment else 0
    return [
        ("replayed before", max(border, WINDOW)) if j < border else ("plain", 0)
        for j in range(max(0, position - WINDOW + 1), position + 1)
    ]


@given(steps())
def test_an_encoder_row_sees_the_same_keys_whatever_the_chunks_and_hits(
    case: tuple[ReplayRule, list[list[Chunk]]],
) -> None:
    rule, plans = case
    if rule.segment == 0:
        return  # hits of exact bring cached windows; there is nothing to replay
    for chunks in plans:
        # the worst memory: every window key before the chunk is plain, as the request's own rows left it
        windows = {i: dict.fromkeys(range(chunk.start), ("plain", 0)) for i, chunk in enumerate(chunks)}
        for i, chunk in enumerate(chunks):
            border = chunk.start - chunk.start % rule.segment
            if border != chunk.start:
                windows[i] |= {
                    p: ("replayed before", max(border, WINDOW)) for p in range(max(0, border - WINDOW), border)
                }
        plan = plan_step(chunks, rule)
        seen: dict[tuple[int, int], list[Version]] = {}
        for one in plan.encoder_passes or (plain_pass(chunks),):
            run_pass(one, windows, seen)
        assert seen == {(i, p): expected_keys(p, rule) for i, p in all_rows(chunks)}


@given(steps())
def test_passes_hold_every_row_once_and_neighbours_of_a_request_together(
    case: tuple[ReplayRule, list[list[Chunk]]],
) -> None:
    rule, plans = case
    for chunks in plans:
        plan = plan_step(chunks, rule)
        if plan.encoder_passes:
            assert sorted(r for one in plan.encoder_passes for r in one.source_rows if r >= 0) == list(
                range(plan.num_rows)
            )
            assert plan.num_replayed > 0
        for one in plan.encoder_passes:
            for i in range(1, len(one.positions)):
                follows = one.positions[i] == one.positions[i - 1] + 1
                assert follows or one.requests[i] != one.requests[i - 1]


@given(steps())
def test_a_row_comes_after_what_a_request_of_its_step_may_have_hit(case: tuple[ReplayRule, list[list[Chunk]]]) -> None:
    rule, plans = case
    for chunks in plans:
        computed: set[tuple[int, int]] = set()
        for one in plan_step(chunks, rule).encoder_passes:
            own = one.source_rows >= 0
            computed |= set(zip(one.requests[own].tolist(), one.positions[own].tolist(), strict=True))
            border = max(p - p % (rule.segment or 1) for p in one.positions[own].tolist())
            before = {(i, p) for i, p in all_rows(chunks) if p < border}
            assert before <= computed


@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.booleans()), min_size=1, max_size=5),
    keep=st.one_of(st.none(), st.integers(WINDOW + 1, 30)),
)
def test_a_step_of_decode_rows_is_planned_as_any_other(prompts: list[tuple[int, int, bool]], keep: int | None) -> None:
    rule = ReplayRule(window=WINDOW, keep_tokens=keep, drops_rows=True)
    chunks = [
        Chunk(start=length + done, stop=length + done + 1, num_prompt=length, needs_every_row=every_row)
        for length, done, every_row in prompts
    ]
    want = plan_step(chunks, rule)
    got = plan_decode(np.array([p[0] for p in prompts]), np.array([p[2] for p in prompts]), len(prompts), rule)
    assert got.decoder_floors.tolist() == want.decoder_floors.tolist()
    assert (got.num_rows, got.decoder_rows, got.encoder_passes) == (want.num_rows, want.decoder_rows, ())


def test_a_step_before_every_kept_row_computes_none() -> None:
    rule = ReplayRule(window=8, keep_tokens=20, drops_rows=True)
    plan = plan_step([Chunk(start=0, stop=30, num_prompt=100), Chunk(start=10, stop=80, num_prompt=100)], rule)
    assert isinstance(plan, StepPlan)
    assert plan.num_decoder_rows == 0
    assert plan.decoder_floors.tolist() == [80, 80]
