"""How many drafts are verified changes no bit of an answer: engines with every schedule, against one without drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.speculative.faults import expensive_s

Results = Mapping[str, RunResult]

FAULTS = "deepinfer_plugin.speculative.faults"
WRONG_ROWS, NEIGHBOURS, EXPENSIVE = (
    f"{FAULTS}:{name}"
    for name in ("rows_of_cut_drafts_count", "confidences_of_a_neighbour", "stored_rows_become_expensive")
)
NUM_DRAFTS, NUM_OUTPUT = 5, 20
VARLEN, FOLDER = "DEEPINFER_ENABLE_MTP_VARLEN", "DEEPINFER_DECODE_PERF_CACHE_DIR"
CHUNKED = ("--max-num-batched-tokens=40", "--max-num-seqs=6")
SMALL_POOL = ("--num-gpu-blocks-override=34", "--max-num-batched-tokens=40", "--max-model-len=192")

SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "greedy too": {},
    "drawn": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.6, "seed": 9, "presence_penalty": 1.1, "frequency_penalty": 0.9},
    "bias": {"temperature": 1.2, "seed": 10, "logit_bias": {"5": 3.0, "17": -4.0}, "min_p": 0.002},
    "minimum": {"temperature": 2.0, "seed": 12, "min_tokens": 9, "stop_token_ids": list(range(10, 100))},
    "regex": {"temperature": 1.0, "seed": 21, "structured_outputs": {"regex": "[0-9]{12,18}"}, "ignore_eos": False},
    "choice": {"structured_outputs": {"choice": ["no no no no", "no no no yes", "maybe"]}, "ignore_eos": False},
}

# name: drafter, lengths, flags, faults; drafts that are right as often as not
INJECTED: Mapping[str, tuple[str, str | None, tuple[str, ...], tuple[str, ...]]] = {
    "fixed": ("partly", None, (), ()),
    "random": ("partly", "random", (), ()),
    "confidence": ("partly", "confidence", (), (NEIGHBOURS,)),
    "confidence, chunks": ("right", "confidence", CHUNKED, ()),
    "confidence, preempted": ("partly", "confidence", SMALL_POOL, ()),
    "none": ("right", "none", (), ()),
}
CUT = ("random", "confidence", "confidence, chunks", "confidence, preempted", "none", "checkpoint, stored")
SCHEDULED = (*INJECTED, "checkpoint, measured", "checkpoint, stored")


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 200, (count,), generator=generator).tolist())


def _requests() -> tuple[Request, ...]:
    return tuple(
        Request(name=name, tokens=_tokens(number, 1 + 11 * number), max_tokens=NUM_OUTPUT, sampling=sampling)
        for number, (name, sampling) in enumerate(SAMPLING.items())
    )


def _engine(name: str, model: Path, method: str | None, *flags: str, **others: Any) -> EngineRun:
    speculative = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=Arithmetic.S32,
        flags=("--block-size=32", *((f"--speculative-config={json.dumps(speculative)}",) if method else ()), *flags),
        actions=(Action(add=_requests()),),
        **others,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curves")


@pytest.fixture(scope="module")
def results(checkpoint: CheckpointFixture, folder: Path) -> Results:
    """Injected drafters; then the checkpoint's own, on step times of this machine and on stored ones."""
    model = checkpoint("nano", 0, drafts_agree=True)
    runs = [_engine("off", model, None)]
    runs += [
        _engine(name, model, "ngram", *flags, drafter=drafter, lengths=lengths, faults=faults)
        for name, (drafter, lengths, flags, faults) in INJECTED.items()
    ]
    runs.append(_engine("wrong rows", model, "ngram", drafter="partly", lengths="confidence", faults=(WRONG_ROWS,)))
    variables = {VARLEN: "1", FOLDER: str(folder)}
    for name, faults in (("checkpoint, measured", (EXPENSIVE,)), ("checkpoint, stored", ())):
        runs.append(_engine(name, model, "dspark", "--max-num-seqs=8", variables=variables, faults=faults))
    return run_engines(runs)


def _differences(found: RunResult, want: RunResult) -> list[str]:
    """Requests whose tokens, scores or ends differ."""
    different = []
    for name, request in want.requests.items():
        other = found.requests[name]
        try:
            assert other.facts.error is None
            assert request.facts.outputs == other.facts.outputs
            assert [tokens.tolist() for tokens in request.tokens] == [tokens.tolist() for tokens in other.tokens]
            for logits, other_logits in zip(request.logits, other.logits, strict=True):
                assert_bitwise_equal(other_logits, logits, name)
        except AssertionError:
            different.append(name)
    return different


@pytest.mark.parametrize("run", SCHEDULED)
def test_no_schedule_changes_a_bit(run: str, results: Results) -> None:
    assert _differences(results[run], results["off"]) == []
    assert sum(len(tokens) for request in results["off"].requests.values() for tokens in request.tokens) > 100


@pytest.mark.parametrize("run", CUT)
def test_drafts_were_left_out(run: str, results: Results) -> None:
    figures, verified = results[run].facts.schedule, results[run].facts.drafts["verified"]
    assert figures["cut_steps"] > 5
    assert figures["left_out"] > 20
    assert (sum(verified) > 0) is (run != "none")
    assert sum(results[run].facts.drafts["drafted"]) - sum(verified) == figures["left_out"]


def test_confidence_leaves_requests_with_lengths_of_all_kinds(results: Results) -> None:
    verified = results["confidence"].facts.drafts["verified"]
    assert verified[0] > verified[1] > verified[2] > 0


def test_without_a_schedule_nothing_is_left_out(results: Results) -> None:
    facts = results["fixed"].facts
    assert facts.schedule["steps"] == 0
    assert facts.drafts["drafted"] == facts.drafts["verified"]
    assert facts.drafts["verified"][0] > 0


def test_requests_were_preempted_and_cut_into_chunks(results: Results) -> None:
    facts = [request.facts for request in results["confidence, preempted"].requests.values()]
    assert sum(fact.num_preemptions for fact in facts) > 0
    chunks = [fact.chunks[0] for fact in (r.facts for r in results["confidence, chunks"].requests.values())]
    assert any(sizes[1] > 1 + NUM_DRAFTS for sizes in chunks)


def test_confidences_of_a_neighbour_are_harmless(results: Results) -> None:
    assert results["confidence"].facts.fault_calls[NEIGHBOURS] > 0


def test_rows_of_cut_drafts_that_count_as_computed_are_noticed(results: Results) -> None:
    assert results["wrong rows"].facts.fault_calls[WRONG_ROWS] > 0
    assert len(_differences(results["wrong rows"], results["off"])) > 2


def test_step_times_are_measured_once_and_then_read(results: Results, folder: Path) -> None:
    assert results["checkpoint, measured"].facts.schedule["steps"] > 5
    (path,) = folder.glob("*.json")
    value = json.loads(path.read_text())
    assert value["rows"][-1] == 8 * (1 + NUM_DRAFTS)
    assert value["times_s"] == [expensive_s(rows) for rows in value["rows"]]
    assert results["checkpoint, measured"].facts.fault_calls[EXPENSIVE] == 1
