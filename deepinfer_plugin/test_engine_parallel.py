"""Two ranks answer with the bits of one: heads, columns and vocabulary shared; experts with and without.

They exchange rows over gloo on the CPU, and over NCCL on two GPUs, where ``ref`` decodes in captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.engine_child.gpus import lack_for
from deepinfer_plugin.engine_child.plan import Action, EngineRun, Request
from deepinfer_plugin.engine_child.run import RunResult, run_engines
from deepinfer_plugin.settings import Arithmetic

ARITHMETICS = (Arithmetic.S32, Arithmetic.REF)  # ref rounds what s32 shows
RANKS = {
    "tensor": ("--tensor-parallel-size=2",),
    "experts": ("--tensor-parallel-size=2", "--enable-expert-parallel"),
}
FLAGS = ("--max-num-seqs=4", "--max-num-batched-tokens=24", "--kv-cache-memory-bytes=33554432")
# Prompts in several chunks, with and without prompt rows, and one that ends within its first chunk.
REQUESTS = (
    Request(name="long", tokens=tuple(range(3, 60)), max_tokens=4, prompt_rows=True),
    Request(name="replayed", tokens=tuple(range(20, 90)), max_tokens=4),
    Request(name="short", tokens=(7,), max_tokens=5),
)


def plan(name: str, model: Path, arithmetic: Arithmetic, flags: tuple[str, ...]) -> EngineRun:
    return EngineRun(
        name=f"{name} {arithmetic.value}",
        model=str(model),
        arithmetic=arithmetic,
        flags=(*FLAGS, *flags),
        actions=(Action(add=REQUESTS),),
    )


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    """Every engine, one after another: two ranks are two processes."""
    if lack := lack_for(2):
        pytest.skip(lack)
    folder, model = tmp_path_factory.mktemp("parallel"), checkpoint("nano", 0)
    engines = [plan("alone", model, arithmetic, ()) for arithmetic in ARITHMETICS]
    engines += [plan(name, model, arithmetic, flags) for name, flags in RANKS.items() for arithmetic in ARITHMETICS]
    results = run_engines(engines, folder)
    log = (folder / "child-0" / "child.log").read_text(encoding="utf-8")
    assert "Worker_TP1 " in log, "no second rank of tensor parallelism has run"
    assert "Worker_TP1_EP1 " in log, "no second rank of expert parallelism has run"
    return results


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_have_the_bits_of_one(name: str, arithmetic: Arithmetic, runs: dict[str, RunResult]) -> None:
    alone, shared = runs[f"alone {arithmetic.value}"], runs[f"{name} {arithmetic.value}"]
    for request in REQUESTS:
        want, got = alone.requests[request.name], shared.requests[request.name]
        assert got.tokens[0].tolist() == want.tokens[0].tolist(), request.name
        assert_bitwise_equal(got.rows, want.rows, label=request.name)
