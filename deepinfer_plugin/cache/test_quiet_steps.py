"""Between two borders of blocks the cache manager is not asked, and what it holds then is what it would have given."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.request import Request, RequestStatus

from deepinfer_plugin.cache import quiet_steps
from deepinfer_plugin.cache.specs import ReplayedWindowSpec
from deepinfer_plugin.replay.settings import ReplaySettings
from deepinfer_plugin.replay.window import ReplayRule
from deepinfer_plugin.wrapping import IS_OURS

WINDOW, WINDOW_BLOCK, BLOCK, MAX_LEN = 128, 32, 128, 1024
COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.uint8, "max_tp_shards": 1}
WINDOWS: dict[str, Any] = {**COMMON, "block_size": WINDOW_BLOCK, "sliding_window": WINDOW}


def config(*, is_ours: bool = True, num_blocks: int = 400) -> KVCacheConfig:
    rule = ReplayRule.from_settings(ReplaySettings(), WINDOW, 0)
    window = (
        ReplayedWindowSpec(**WINDOWS, bounded_replay=True, rule=rule) if is_ours else SlidingWindowMLASpec(**WINDOWS)
    )
    specs = (
        MLAAttentionSpec(**COMMON, block_size=BLOCK),
        window,
        SlidingWindowMLASpec(**WINDOWS),
        CircularBufferSpec(**COMMON, block_size=8, head_size_v=0),
    )
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def manager(**options: Any) -> KVCacheManager:
    init_none_hash(sha256)
    return KVCacheManager(config(**options), MAX_LEN, scheduler_block_size=BLOCK, hash_block_size=WINDOW_BLOCK)


def request(name: str, length: int) -> Request:
    tokens = list(range(7, 7 + length))
    params = SamplingParams(max_tokens=900)
    return Request(name, tokens, params, None, block_hasher=get_request_block_hasher(WINDOW_BLOCK, sha256))


class Run:
    """A manager and its requests, driven as the scheduler drives them."""

    def __init__(self, *, is_quiet: bool, in_flight: int = 0, **options: Any) -> None:
        self.manager, self.is_quiet, self.num_asked = manager(**options), is_quiet, 0
        self.in_flight = in_flight  # tokens of steps that are planned and not over
        self._original = KVCacheManager.allocate_slots.__wrapped__

    def allocate(self, one: Request, count: int, **options: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_asked += 1
            return self._original(*args, **kwargs)

        around = (
            quiet_steps._allocate if self.is_quiet else (lambda original, *args, **kwargs: original(*args, **kwargs))
        )
        return around(counted, self.manager, one, count, **options)

    def admit(self, one: Request) -> None:
        found, length, _ = self.manager.get_computed_blocks(one)
        count = one.num_tokens - length
        assert self.allocate(one, count, num_new_computed_tokens=length, new_computed_blocks=found) is not None
        one.status, one.num_computed_tokens = RequestStatus.RUNNING, one.num_tokens

    def decode(self, one: Request, count: int = 1, lookahead: int = 0) -> list[list[int]] | None:
        """Blocks given for a step of ``count`` rows whose tokens then are known."""
        found = self.allocate(one, count, num_lookahead_tokens=lookahead)
        if found is None:
            return None
        one.append_output_token_ids(list(range(count)))
        one.num_computed_tokens += count
        one.num_in_flight_tokens = self.in_flight
        return [[block.block_id for block in group] for group in found.blocks] if any(found.blocks) else []

    def held(self, one: Request) -> list[tuple[int, list[bool], int]]:
        """Of each group: blocks, which of them are real, and how many are kept for other prompts."""
        facts = []
        for group in self.manager.coordinator.single_type_managers:
            blocks = group.req_to_blocks[one.request_id]
            is_real = [not block.is_null for block in blocks]
            facts.append((len(blocks), is_real, group.num_cached_block.get(one.request_id, 0)))
        return facts


def test_the_method_is_wrapped_where_our_caches_are_known() -> None:
    assert getattr(KVCacheManager.allocate_slots, IS_OURS)


@pytest.mark.parametrize(("lookahead", "in_flight"), [(0, 0), (0, 1), (5, 6)])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 200])
def test_what_a_request_holds_is_what_it_would_hold(length: int, lookahead: int, in_flight: int) -> None:
    """After every step of up to 6 rows: the same blocks in number, the same freed, as many kept."""
    runs = [Run(is_quiet=is_quiet, in_flight=in_flight) for is_quiet in (True, False)]
    pair = [request("a", length) for _ in runs]
    for run, one in zip(runs, pair, strict=True):
        run.admit(one)
    steps = random.Random(length)
    for _ in range(120):
        count = steps.choice((1, 1, 1, 2, 6)) if lookahead else 1
        for run, one in zip(runs, pair, strict=True):
            assert run.decode(one, count, lookahead) is not None
        got, want = (run.held(one) for run, one in zip(runs, pair, strict=True))
        assert got == want
    quiet, asked = (run.num_asked for run in runs)
    assert asked == 121
    assert quiet < (80 if lookahead else 16), "the manager is asked between borders"


def test_a_fault_in_the_stretch_is_noticed() -> None:
    """Planted: a longer border than a window's block, so that a block is missing when a row writes to it."""
    run, one = Run(is_quiet=True), request("a", 40)
    setattr(run.manager, quiet_steps._BORDERS, (BLOCK, ()))
    run.admit(one)
    for _ in range(30):
        run.decode(one)
    (_, window, *_) = run.held(one)
    assert window[0] * WINDOW_BLOCK < one.num_computed_tokens


def test_a_request_that_comes_back_is_asked_for_again() -> None:
    """Its second chunk ends in the stretch of the last step before it was preempted; its blocks are gone."""
    run, one = Run(is_quiet=True), request("a", 40)
    run.admit(one)
    for _ in range(3):
        run.decode(one)
    run.manager.free(one)
    one.status, one.num_computed_tokens = RequestStatus.PREEMPTED, 0
    assert run.allocate(one, 16) is not None
    one.status, one.num_computed_tokens = RequestStatus.RUNNING, 16
    assert run.allocate(one, one.num_tokens - 16) is not None
    assert run.held(one)[1][0] == -(-one.num_tokens // WINDOW_BLOCK)


def test_a_full_cache_is_told_at_every_try() -> None:
    run = Run(is_quiet=True, num_blocks=8)
    one = request("a", 60)
    run.admit(one)
    results = [run.decode(one) for _ in range(10)]
    assert None in results
    assert results[results.index(None) :] == [None] * (10 - results.index(None))


def test_other_models_are_always_asked() -> None:
    run, one = Run(is_quiet=True, is_ours=False), request("a", 40)
    run.admit(one)
    for _ in range(10):
        run.decode(one)
    assert run.num_asked == 11


def test_windows_end_their_width_behind_the_last_token() -> None:
    assert quiet_steps.window_ends(manager()) == (1 - WINDOW,)


def test_the_border_is_that_of_all_groups_but_rings() -> None:
    assert quiet_steps.border_of(config(), WINDOW_BLOCK) == WINDOW_BLOCK
    assert quiet_steps.border_of(config(), 16) == 16
    assert quiet_steps.border_of(config(is_ours=False), WINDOW_BLOCK) is None
