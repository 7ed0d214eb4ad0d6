"""Two, four and eight ranks answer with the bits of one; four ranks in two replicas, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic
from deepinfer_plugin.test_engine_replicas import free_port

FLAGS = ("--max-num-seqs=4", "--max-num-batched-tokens=24", "--kv-cache-memory-bytes=33554432")
REPLICA = ("--tensor-parallel-size=2", "--no-async-scheduling")  # as in test_engine_replicas
EXPERTS = "--enable-expert-parallel"
RANKS = {
    "tensor 2": ("--tensor-parallel-size=2",),
    "tensor 4": ("--tensor-parallel-size=4",),
    "tensor 8": ("--tensor-parallel-size=8",),
    "experts 8": ("--tensor-parallel-size=8", EXPERTS),
}
REQUESTS = (
    Request(name="long", tokens=tuple(range(3, 60)), max_tokens=4, prompt_rows=True),
    Request(name="replayed", tokens=tuple(range(20, 190)), max_tokens=3),
    Request(name="short", tokens=(7,), max_tokens=5),
)


def engine(name: str, model: Path, arithmetic: Arithmetic, *flags: str) -> EngineRun:
    return EngineRun(
        name=f"{name} {arithmetic.value}",
        model=str(model),
        arithmetic=arithmetic,
        flags=(*FLAGS, *flags),
        actions=(Action(add=REQUESTS),),
    )


def differing_rows(one: RunResult, other: RunResult) -> tuple[int, int]:
    """Rows that differ, and rows in all."""
    pairs = [(one.requests[request.name].rows, other.requests[request.name].rows) for request in REQUESTS]
    assert all(a.shape == b.shape for a, b in pairs)
    differ = [(a.view(torch.int32) != b.view(torch.int32)).any(dim=1) for a, b in pairs]
    return sum(int(rows.sum()) for rows in differ), sum(len(rows) for rows in differ)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    if request.config.getoption("--depth") != "full":
        pytest.skip("up to eight processes: part of --depth full")
    return checkpoint("wide", 0)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", [Arithmetic.S32, Arithmetic.REF])
def test_any_number_of_ranks_has_the_bits_of_one(arithmetic: Arithmetic, model: Path, tmp_path: Path) -> None:
    if lack := lack_for(8):
        pytest.skip(lack)
    engines = [engine("one", model, arithmetic)]
    engines += [engine(name, model, arithmetic, *flags) for name, flags in RANKS.items()]
    results = run_engines(engines, tmp_path)
    log = (tmp_path / "child-0" / "child.log").read_text(encoding="utf-8")
    for name in ("Worker_TP1 ", "Worker_TP3 ", "Worker_TP7 ", "Worker_TP7_EP7 "):
        assert name in log, f"not exercised: no {name}has run"
    one, num_rows = results[f"one {arithmetic.value}"], 56 + 4 + 3 + 5
    found = {name: differing_rows(one, results[f"{name} {arithmetic.value}"]) for name in RANKS}
    assert found == dict.fromkeys(RANKS, (0, num_rows))


@pytest.mark.slow
def test_two_replicas_of_two_ranks_have_the_bits_of_one(model: Path, tmp_path: Path) -> None:
    if lack := lack_for(4):
        pytest.skip(lack)
    port = str(free_port())
    runs = [engine("one", model, Arithmetic.S32)]
    for rank in range(2):
        run = engine(f"replica {rank}", model, Arithmetic.S32, *REPLICA, EXPERTS)
        variables = {
            "VLLM_DP_SIZE": "2",
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": port,
        }
        runs.append(replace(run, variables=variables))
    alone = run_engines(runs[:1], tmp_path / "one")
    shared = run_engines(runs[1:], tmp_path / "replicas", num_children=2)
    for rank in range(2):
        log = (tmp_path / "replicas" / f"child-{rank}" / "child.log").read_text(encoding="utf-8")
        assert f"Worker_DP{rank}_TP1_EP{2 * rank + 1} " in log, f"replica {rank} did not share its experts"
    found = [differing_rows(alone["one s32"], result)[0] for result in shared.values()]
    assert found == [0, 0]
