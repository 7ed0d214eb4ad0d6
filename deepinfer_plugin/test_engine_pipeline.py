"""Two stages of a pipeline answer with the bits of one process, alone and where two ranks share each stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import ACTED, Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.platforms.cpu import ASYNC_SCHEDULING
from deepinfer_plugin.replay.settings import KEEP_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

MARK, BLOCK, KEEP = 254, 32, 20
FLAGS = (
    f"--block-size={BLOCK}",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=24",
    "--kv-cache-memory-bytes=33554432",
)
STAGES = "--pipeline-parallel-size=2"
AHEAD = ("--async-scheduling", f"--additional-config={json.dumps({ASYNC_SCHEDULING: True})}")
WAYS = {
    "stages": (STAGES,),
    "stages, a step ahead": (STAGES, *AHEAD),
    "stages of two ranks": (STAGES, "--tensor-parallel-size=2", "--enable-expert-parallel"),
}
FAULT = "deepinfer_plugin.model.faults.LostPreMix"
WORDS = tuple(range(3, 90))
# Prompts in several chunks, with decoder rows left out, with prompt rows, with an image that is cut by a chunk
FIRST = (
    Request(name="rows", tokens=WORDS[:57], max_tokens=4, prompt_rows=True),
    Request(name="replayed", tokens=WORDS, max_tokens=7, sampling={"temperature": 1.0, "seed": 4}),
    Request(name="image", tokens=(*WORDS[:20], MARK, *WORDS[20:60]), images=((1, 150, 90),), max_tokens=4),
    Request(name="short", tokens=(7,), max_tokens=9),
)
AGAIN = tuple(replace(one, name=f"{one.name}@hit", prompt_rows=False) for one in FIRST)
NAMES = tuple(request.name for request in (*FIRST, *AGAIN))


def _engine(name: str, model: Path, *flags: str) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=(*FLAGS, *flags),
        actions=(Action(add=FIRST), *(Action(add=(request,)) for request in AGAIN)),
        variables={KEEP_VARIABLE: str(KEEP)},
    )


@pytest.fixture(scope="module")
def found(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str]:
    """Results by engine, and the log of all of them."""
    if lack := lack_for(2):
        pytest.skip(lack)
    folder, model = tmp_path_factory.mktemp("pipeline"), checkpoint("nano", 0)
    ways = {name: flags for name, flags in WAYS.items() if not lack_for(4) or "ranks" not in name}
    # the fault first: vLLM adds to the worker class of an engine in one process, which a subclass then has twice
    runs = [_engine("fault", model, STAGES, f"--worker-cls={FAULT}"), _engine("one", model)]
    runs += [_engine(name, model, *flags) for name, flags in ways.items()]
    return run_engines(runs, folder), (folder / "child-0" / "child.log").read_text(encoding="utf-8")


def _assert_equal(results: Results, name: str) -> None:
    for request in NAMES:
        got, want = (results[engine].requests[request] for engine in (name, "one"))
        assert want.facts.finished
        assert torch.equal(got.tokens[0], want.tokens[0]), request
        assert_bitwise_equal(got.rows, want.rows, label=request)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_stages_have_the_bits_of_one_process(name: str, found: tuple[Results, str]) -> None:
    results, log = found
    if name not in results:
        pytest.skip(lack_for(4))
    assert "Worker_PP1" in log, "no second stage has run"
    assert name != "stages of two ranks" or "Worker_PP1_TP1_EP1 " in log
    _assert_equal(results, name)


@pytest.mark.slow
def test_rows_were_left_out_and_prefixes_hit(found: tuple[Results, str]) -> None:
    for name in ("one", *found[0].keys() & WAYS.keys()):
        hits = {request: found[0][name].requests[request].facts.num_cached_tokens for request in NAMES}
        assert hits["replayed@hit"] == 2 * BLOCK, name
        assert hits["image@hit"] == BLOCK, "inside the span of the image"


@pytest.mark.slow
def test_a_mix_that_is_lost_between_stages_is_noticed(found: tuple[Results, str]) -> None:
    assert f"{ACTED}LostPreMix" in found[1]
    with pytest.raises(AssertionError):
        _assert_equal(found[0], "fault")
