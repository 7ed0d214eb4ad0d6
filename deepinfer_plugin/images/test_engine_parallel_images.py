"""Images on two ranks have the bits of one, also where a span is cut by a chunk or by a hit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

MARK, BLOCK = 254, 32
FLAGS = (
    f"--block-size={BLOCK}",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=24",
    "--kv-cache-memory-bytes=33554432",
)
SEGMENT = {MODE_VARIABLE: "compact", KEEP_VARIABLE: "20", ENCODER_VARIABLE: f"segment:{BLOCK}"}
WORDS = tuple(range(3, 60))
FIRST = (
    Request(name="cut", tokens=(*WORDS[:20], MARK, *WORDS[20:40]), images=((1, 150, 90),), max_tokens=4),
    Request(
        name="two", tokens=(*WORDS[:5], MARK, MARK, *WORDS[5:40]), images=((2, 90, 200), (3, 40, 40)), max_tokens=4
    ),
    Request(name="text", tokens=WORDS, max_tokens=4),
)
AGAIN = tuple(replace(one, name=f"{one.name}@hit") for one in FIRST)


def _engine(name: str, model: Path, *flags: str) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=(*FLAGS, *flags),
        actions=(Action(add=FIRST), *(Action(add=(request,)) for request in AGAIN)),
        variables=SEGMENT,
    )


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunResult]:
    """One rank, then two, which are two processes."""
    if lack := lack_for(2):
        pytest.skip(lack)
    folder, model = tmp_path_factory.mktemp("ranks"), checkpoint("nano", 0)
    found = run_engines([_engine("one", model), _engine("two", model, "--tensor-parallel-size=2")], folder)
    log = (folder / "child-0" / "child.log").read_text(encoding="utf-8")
    assert "Worker_TP1 " in log, "no second rank has run"
    return found


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one(results: Mapping[str, RunResult]) -> None:
    for request in (*FIRST, *AGAIN):
        want, got = results["one"].requests[request.name], results["two"].requests[request.name]
        assert got.facts.error is None
        assert got.tokens[0].tolist() == want.tokens[0].tolist(), request.name
        assert_bitwise_equal(got.rows, want.rows, label=request.name)


@pytest.mark.slow
def test_spans_were_cut_and_hit(results: Mapping[str, RunResult]) -> None:
    one, two = (results[name].requests["cut@hit"].facts for name in ("one", "two"))
    assert one.num_cached_tokens == two.num_cached_tokens == BLOCK  # inside the span, from 20 to 37
    assert len(results["two"].requests["two"].facts.chunks[0]) > 4
    assert results["one"].facts.replay["segment_hits"] > 0
