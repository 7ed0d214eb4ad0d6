"""Planted faults of the ranks are caught; that the number of ranks does not matter stands among the relations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import ACTED, Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.reference.tiny import write_checkpoint
from deepinfer_plugin.settings import Arithmetic

MODULE = "deepinfer_determinism.rank_mutants"
FAULTS = ("SumCutByRanks", "PartialSumsOfExperts", "OrderOfArrival", "OtherDraftsOnOneRank")
DRAFTS = '--speculative-config={"method": "dspark", "num_speculative_tokens": 5}'
FLAGS = ("--max-num-seqs=4", "--max-num-batched-tokens=24", "--kv-cache-memory-bytes=33554432")
# chunks, a prompt whose decoder rows are replayed, and requests that decode beside a prefill
REQUESTS = (
    Request(name="short", tokens=(7, 9, 11), max_tokens=6),
    Request(name="rows", tokens=tuple(range(3, 50)), max_tokens=3, prompt_rows=True),
    Request(name="long", tokens=tuple(range(60, 220)), max_tokens=4),
)


def engine(name: str, model: Path, *flags: str) -> EngineRun:
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=(*FLAGS, *flags),
        actions=(Action(add=REQUESTS),),
    )


def differing_rows(one: RunResult, other: RunResult) -> int:
    pairs = [(one.requests[request.name].rows, other.requests[request.name].rows) for request in REQUESTS]
    return sum(int((a.view(torch.int32) != b.view(torch.int32)).any(dim=1).sum()) for a, b in pairs)


@pytest.fixture(scope="module")
def found(depth: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, RunResult], str]:
    """Results by engine, and the log of all of them."""
    if depth != "full":
        pytest.skip("six engines, five of two processes: part of --depth full")
    if lack := lack_for(2):
        pytest.skip(lack)
    folder = tmp_path_factory.mktemp("ranks")
    model = folder / "nano"
    write_checkpoint("nano", 0, model)
    runs = []
    for name in FAULTS:
        drafts = (DRAFTS,) if "Drafts" in name else ()
        runs.append(engine(name, model, "--tensor-parallel-size=2", f"--worker-cls={MODULE}.{name}", *drafts))
    runs.append(engine("drafts", model, "--tensor-parallel-size=2", DRAFTS))
    # last: vLLM adds its extension to the worker class of an engine in the child's own process, and refuses it then
    # for the faults' classes
    results = run_engines([*runs, engine("one", model)], folder / "runs")
    return results, (folder / "runs" / "child-0" / "child.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_two_ranks_with_drafts_have_the_rows_of_one_without(found: tuple[dict[str, RunResult], str]) -> None:
    results, log = found
    assert "Worker_TP1" in log, "not exercised: no second rank has run"
    assert differing_rows(results["one"], results["drafts"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_the_ranks_is_caught(name: str, found: tuple[dict[str, RunResult], str]) -> None:
    results, log = found
    assert f"{ACTED}{name}" in log, "the fault did not act"
    assert differing_rows(results["one"], results[name]) > 0
