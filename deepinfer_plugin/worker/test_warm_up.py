"""Which passes warm the kernels up, and what the log says meanwhile; no GPU and no engine."""

import time
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepinfer_kernels import tiling
from deepinfer_plugin.worker import warm_up as module
from deepinfer_plugin.worker.warm_up import Pass, counting_compilations, row_limits, run_passes, warm_passes

RELEASED = {"max_rows": 8192, "max_model_len": 1 << 20, "num_experts": 384, "top_k": 6}


def test_both_sides_of_every_limit_are_run() -> None:
    rows = {count for count, _ in warm_passes(**RELEASED)}
    limits = [limit for limit in row_limits(384, 6) if limit < RELEASED["max_rows"]]
    assert {16, 64, 128, 512, 1024, 16 * 64, 32 * 64, 48 * 64, 4096 // 6} <= set(limits)
    assert all({limit, limit + 1} <= rows for limit in limits)


def test_every_interval_between_limits_has_a_multiple_of_16_and_another_number() -> None:
    rows = {count for count, _ in warm_passes(**RELEASED)}
    assert 1 in rows
    borders = [16, *(limit for limit in row_limits(384, 6) if 16 < limit < RELEASED["max_rows"]), RELEASED["max_rows"]]
    for low, high in pairwise(borders):
        inside = {count for count in rows if low < count <= high}
        assert any(count % 16 != 0 for count in inside), (low, high)
        if high % 16 == 0:
            assert any(count % 16 == 0 for count in inside), (low, high)


def test_a_selection_of_every_power_of_two_is_run_up_to_the_longest_context() -> None:
    lengths = {length for rows, length in warm_passes(**RELEASED) if rows == 5}
    assert {1 << power for power in range(6, 21)} == lengths
    assert tiling.TOPK_CHUNK in lengths


def test_no_pass_is_larger_than_a_step_or_a_context() -> None:
    passes = warm_passes(max_rows=40, max_model_len=100, num_experts=8, top_k=2)
    assert all(0 < rows <= 40 and length <= 100 for rows, length in passes)
    assert {1, 16, 17, 39, 40} <= {rows for rows, _ in passes}
    assert max(length for _, length in passes) == 100


def test_the_log_counts_passes_kernels_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    compiled: list[str] = []
    done: list[Pass] = []

    def run(each: Pass) -> None:
        done.append(each)
        compiled.append("kernel")

    lines: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda text, *values: lines.append(text % values))
    run_passes([(3, 3), (2, 2), (1, 1)], run, compiled)
    assert done == [(3, 3), (2, 2), (1, 1)]
    assert lines == [
        "Kernels: 0 of 3 passes",
        "Kernels: 2 of 3 passes, 2 compiled, 6 s",
        "Kernels: 3 of 3 passes, 3 compiled, 9 s",
    ]


def test_compilations_count_and_cache_hits_do_not() -> None:
    from triton import knobs

    heard: list[bool] = []
    before = knobs.compilation.listener
    try:
        knobs.compilation.listener = lambda **facts: heard.append(facts["cache_hit"])
        with counting_compilations() as compiled:
            for name, is_hit in (("first", False), ("second", True)):
                source = SimpleNamespace(name=name)
                knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=is_hit)
        assert compiled == ["first"]
        assert heard == [False, True]
        assert knobs.compilation.listener is not None
    finally:
        knobs.compilation.listener = before


@pytest.mark.parametrize(
    "name", ["restrict_logits", "sample_tokens", "sum_smaller_probs", "token_log_softmax", "top_tokens"]
)
def test_a_draw_takes_every_operation_of_the_sampler(name: str) -> None:
    original = getattr(module, name)
    with mock.patch.object(module, name, wraps=original) as called:
        module.draw_once(40, torch.device("cpu"))
    assert called.call_count == (2 if name == "restrict_logits" else 1)
