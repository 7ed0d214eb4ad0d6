"""Experts that move between ranks while requests run change no bit of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.engine_child.gpus import lack_for, serving_gpus
from deepinfer_plugin.engine_child.plan import ACTED, Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic

EXPERTS = ("--tensor-parallel-size=2", "--enable-expert-parallel")
FLAGS = ("--max-num-seqs=4", "--max-num-batched-tokens=24", "--kv-cache-memory-bytes=33554432")
# Chunks, a prompt whose decoder rows are replayed, and decoding beside a prefill: moves fall into all of them.
REQUESTS = (
    Request(name="long", tokens=tuple(range(3, 60)), max_tokens=6, prompt_rows=True),
    Request(name="replayed", tokens=tuple(range(20, 190)), max_tokens=4),
    Request(name="short", tokens=(7,), max_tokens=9),
)
# policy -> replicas of experts; nano has 8 experts in each layer, and 1 is rounded up to 2
POLICIES = {"summed_peak": 1, "vllm": 0, "rotate": 2, "uneven": 2}
FAULTS = ("StaleWeights", "RememberedWeights", "MapsBeforeWeights")
Found = tuple[dict[str, RunResult], str]
"""Results by engine, and the log of all of them."""


def engine(name: str, model: Path, policy: str, *flags: str, arithmetic: Arithmetic = Arithmetic.S32) -> EngineRun:
    """Moves after every second step; the first comes after the first."""
    config = {"window_size": 2, "step_interval": 2, "num_redundant_experts": POLICIES[policy]}
    return EngineRun(
        name=name,
        model=str(model),
        arithmetic=arithmetic,
        flags=(*FLAGS, *EXPERTS, "--enable-eplb", f"--eplb-config={json.dumps(config)}", *flags),
        actions=(Action(add=REQUESTS),),
        variables={"DEEPINFER_EPLB_POLICY": policy, "DEEPINFER_EPLB_COUNT_PREFILL": "1"},
    )


def still(model: Path, arithmetic: Arithmetic = Arithmetic.S32) -> EngineRun:
    """One rank, which has all experts where they always were."""
    return EngineRun(
        name="still", model=str(model), arithmetic=arithmetic, flags=FLAGS, actions=(Action(add=REQUESTS),)
    )


def run(runs: Sequence[EngineRun], folder: Path) -> Found:
    return run_engines(runs, folder), (folder / "child-0" / "child.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Found:
    if lack := lack_for(2):
        pytest.skip(lack)
    model = checkpoint("nano", 0)
    runs = [engine(fault, model, "rotate", f"--worker-cls={__package__}.faults.{fault}") for fault in FAULTS]
    runs += [engine(policy, model, policy) for policy in POLICIES]
    # vLLM adds its extension to the worker class of an engine in the child's own process; the faults' classes then have
    # it already, which vLLM refuses where workers are forked: so that engine comes last
    return run([*runs, still(model)], tmp_path_factory.mktemp("moves"))


@pytest.fixture(scope="module")
def found_in_graphs(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same in the served arithmetic, whose graphs were captured before the first move."""
    if not serving_gpus():
        pytest.skip("the CPU captures no graphs: needs 2 GPUs")
    if lack := lack_for(2):
        pytest.skip(lack)
    model = checkpoint("nano", 0)
    runs = [engine(policy, model, policy, arithmetic=Arithmetic.REF) for policy in POLICIES]
    return run([*runs, still(model, Arithmetic.REF)], tmp_path_factory.mktemp("graphs"))


def check(policy: str, found: Found) -> None:
    results, log = found
    moves = re.findall(rf"Worker_TP0_EP0 .*Experts moved \({policy}, move (\d+)\): (\d+) of (\d+) slots", log)
    assert len(moves) >= 2, f"not exercised: {policy} moved experts {len(moves)} times"
    assert {int(total) for _, _, total in moves} == {7 * (8 + 2 * (POLICIES[policy] > 0))}
    for request in REQUESTS:
        want, got = results["still"].requests[request.name], results[policy].requests[request.name]
        assert got.tokens[0].tolist() == want.tokens[0].tolist(), request.name
        assert_bitwise_equal(got.rows, want.rows, label=request.name)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_moved_experts_change_no_bit(policy: str, found: Found) -> None:
    check(policy, found)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_moved_experts_change_no_bit_in_captured_graphs(policy: str, found_in_graphs: Found) -> None:
    check(policy, found_in_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_moving_is_caught(fault: str, found: Found) -> None:
    results, log = found
    assert f"{ACTED}{fault}" in log, "the fault did not act"
    pairs = [(results["still"].requests[one.name].rows, results[fault].requests[one.name].rows) for one in REQUESTS]
    assert sum(int((a.view(torch.int32) != b.view(torch.int32)).any(dim=1).sum()) for a, b in pairs) > 0
