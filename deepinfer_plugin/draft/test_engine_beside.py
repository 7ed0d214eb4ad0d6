"""Drafts of the checkpoint's own blocks beside images and on two ranks: answers are those of no drafts on one rank."""

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
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.replay.settings import MODE_VARIABLE
from deepinfer_plugin.settings import Arithmetic

Results = Mapping[str, RunResult]

NUM_DRAFTS, NUM_OUTPUT, MARK = 5, 14, 254
DRAFTS = f"--speculative-config={json.dumps({'method': 'dspark', 'num_speculative_tokens': NUM_DRAFTS})}"
FLAGS = (
    "--block-size=32",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=31",  # chunks cut prompts and image spans
    "--kv-cache-memory-bytes=33554432",
)
A, B = (1, 150, 90), (2, 90, 200)  # recipes
DRAWN = {"temperature": 1.0, "seed": 4}


def _words(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())


TEXT = (
    Request(name="long", tokens=_words(1, 57), max_tokens=NUM_OUTPUT),
    Request(name="drawn", tokens=_words(2, 70), max_tokens=NUM_OUTPUT, sampling=DRAWN),
    Request(name="short", tokens=(7,), max_tokens=NUM_OUTPUT + 1),
)
PICTURES = (
    Request(name="one", tokens=(*_words(3, 9), MARK, *_words(4, 12)), images=(A,), max_tokens=NUM_OUTPUT),
    Request(
        name="two",
        tokens=(*_words(5, 6), MARK, MARK, *_words(6, 33)),
        images=(B, A),
        max_tokens=NUM_OUTPUT,
        sampling=DRAWN,
    ),
    # the span ends the prompt, so that n-grams of drafts meet it
    Request(name="last", tokens=(*_words(7, 12), MARK), images=(A,), max_tokens=NUM_OUTPUT + 1),
)
REQUESTS = (*TEXT, *PICTURES)


def _run(name: str, model: Path, *flags: str) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=(*FLAGS, *flags),
        actions=(Action(add=TEXT), Action(add=PICTURES), Action(add=(_again(PICTURES[1]),))),
        variables={MODE_VARIABLE: "off"},  # prompts as short as these are otherwise computed whole, without hits
    )


def _again(request: Request) -> Request:
    """The same prompt, whose prefix is then cached, image included."""
    return replace(request, name=f"{request.name}@hit")


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All engines; two ranks are two processes."""
    if lack := lack_for(2):
        pytest.skip(lack)
    model, folder = checkpoint("nano", 0, drafts_agree=True), tmp_path_factory.mktemp("beside")
    runs = [_run("off", model), _run("drafts", model, DRAFTS)]
    runs.append(_run("two ranks", model, DRAFTS, "--tensor-parallel-size=2"))
    found = run_engines(runs, folder)
    log = (folder / "child-0" / "child.log").read_text(encoding="utf-8")
    assert "Worker_TP1 " in log, "no second rank has run"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run", ["drafts", "two ranks"])
def test_drafts_change_no_bit(run: str, results: Results) -> None:
    for name, want in results["off"].requests.items():
        found = results[run].requests[name]
        assert want.facts.error is None, want.facts.error
        assert found.tokens[0].tolist() == want.tokens[0].tolist(), name
        assert_bitwise_equal(found.rows, want.rows, f"{run}, {name}")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["drafts", "two ranks"])
@pytest.mark.parametrize("requests", [TEXT, PICTURES], ids=["text", "images"])
def test_drafts_were_accepted_and_rejected(run: str, requests: tuple[Request, ...], results: Results) -> None:
    """Counted from what steps computed and brought: what workers of several ranks count stays with them."""
    facts = [results[run].requests[request.name].facts for request in requests]
    verified = sum(max(size - 1, 0) for fact in facts for size in fact.chunks[0][1 - len(fact.produced[0]) :])
    accepted = sum(brought - 1 for fact in facts for brought in fact.produced[0])
    assert 0 < accepted < verified


@pytest.mark.slow
def test_ranks_draft_alike(results: Results) -> None:
    """Two ranks take the same steps as one."""
    assert results["two ranks"].facts.steps == results["drafts"].facts.steps


@pytest.mark.slow
def test_spans_were_cut_and_hit(results: Results) -> None:
    for run in ("off", "drafts", "two ranks"):
        requests = results[run].requests
        assert len(requests["two"].facts.chunks[0]) > len(requests["two"].facts.produced[0])
        assert requests["two@hit"].facts.num_cached_tokens > 0
