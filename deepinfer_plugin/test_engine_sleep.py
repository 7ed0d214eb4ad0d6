"""An engine that has slept answers with the bits it had before: weights and state beside them come back from the host.

vLLM gives memory back with CUDA's allocator only, so there is nothing to try without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.gpus import lack_for, serving_gpus
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import run_engines
from deepinfer_plugin.settings import Arithmetic

FLAGS = ("--enable-sleep-mode", "--max-num-seqs=4", "--max-num-batched-tokens=64")
REQUESTS = (
    Request(name="long", tokens=tuple(range(3, 190)), max_tokens=6, prompt_rows=True),
    Request(name="cached", tokens=tuple(range(20, 180)), max_tokens=6),
    Request(name="drawn", tokens=tuple(range(30, 60)), max_tokens=6, sampling={"temperature": 1.0, "seed": 5}),
)
RANKS = {"one": (), "two": ("--tensor-parallel-size=2",)}


def named(when: str) -> tuple[Request, ...]:
    return tuple(replace(request, name=f"{request.name} {when}") for request in REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_sleep_changes_no_bit(ranks: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if not serving_gpus():
        pytest.skip("vLLM lets no engine sleep on the CPU")
    if lack := lack_for(2 if ranks == "two" else 1):
        pytest.skip(lack)
    interrupted = named("interrupted")
    run = EngineRun(
        name=ranks,
        model=str(checkpoint("nano", 0)),
        arithmetic=Arithmetic.REF,
        flags=(*FLAGS, *RANKS[ranks]),
        actions=(
            Action(add=named("before")),
            Action(add=interrupted, steps=3),
            Action(abort=tuple(request.name for request in interrupted), add=named("behind"), sleep=True),
            Action(add=named("behind again"), sleep=True),
        ),
    )
    result = run_engines([run], tmp_path)[ranks]
    assert "Sleep mode freed" in (tmp_path / "child-0" / "child.log").read_text(encoding="utf-8")
    for request in REQUESTS:
        want = result.requests[f"{request.name} before"]
        for when in ("behind", "behind again"):
            got = result.requests[f"{request.name} {when}"]
            assert got.facts.num_cached_tokens == 0, "the cache was thrown away"
            assert got.tokens[0].tolist() == want.tokens[0].tolist(), got
            assert_bitwise_equal(got.rows, want.rows, label=f"{request.name} {when}")
