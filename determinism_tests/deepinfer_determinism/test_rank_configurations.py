"""Which relations are tried on two ranks, by device and number of GPUs."""

from __future__ import annotations

import pytest

from deepinfer_determinism.cases import Case, Configuration
from deepinfer_determinism.configurations import configurations
from deepinfer_determinism.engine_facts import CAPTURED_SIZES, RANKS
from deepinfer_determinism.harness import Options
from deepinfer_determinism.relations import BY_NAME, Setting
from deepinfer_determinism.session import Plan
from deepinfer_determinism.test_data import SIZES
from deepinfer_plugin.settings import Arithmetic

TENSOR, EXPERTS = "--tensor-parallel-size=2", "--enable-expert-parallel"
STAGES = "--pipeline-parallel-size=2"
NUM_ALL = len(BY_NAME) - 1  # restart is about processes
S32, REF = (Arithmetic.S32, "alone s32"), (Arithmetic.REF, "alone")
Described = dict[str, tuple[tuple[Arithmetic, str], tuple[str, ...], int]]
"""By label: arithmetic and what its rows are compared with, flags, number of relations."""
CPU: dict[str, Described] = {
    "quick": {"ranks 2": (S32, (TENSOR, EXPERTS), 1)},
    "full": {
        "ranks 2": (S32, (TENSOR, EXPERTS), NUM_ALL),
        "ranks 2 tensor": (S32, (TENSOR,), 4),
        "ranks 2 stages": (S32, (STAGES,), 7),
    },
}
CUDA: dict[str, Described] = {
    "quick": {**CPU["quick"], "ranks 2 tensor ref": (REF, (TENSOR,), 1)},
    "full": {
        **CPU["full"],
        "ranks 2 ref": (REF, (TENSOR, EXPERTS), NUM_ALL),
        "ranks 2 tensor ref": (REF, (TENSOR,), 4),
        "ranks 2 stages ref": (REF, (STAGES,), 7),
    },
}


def of_ranks(device: str, depth: str, num_places: int) -> list[Configuration]:
    found = configurations(Setting(device=device), SIZES, depth, 3, num_places)
    return [item for item in found if item.label.startswith("ranks")]


def described(found: list[Configuration]) -> Described:
    return {
        item.label: ((item.setting.arithmetic, item.alone_name), item.setting.flags, len(item.relations))
        for item in found
    }


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_the_table_of_each_device(depth: str) -> None:
    assert described(of_ranks("cpu", depth, 0)) == CPU[depth]
    assert described(of_ranks("cuda", depth, 2)) == CUDA[depth]
    assert described(of_ranks("cuda", depth, 1)) == CUDA[depth]


def test_the_alone_of_each_arithmetic_is_one_rank_without_graphs() -> None:
    for item in of_ranks("cuda", "full", 2):
        run = item.alone.run
        assert run.arithmetic is item.setting.arithmetic
        assert TENSOR not in run.flags
        assert "--enforce-eager" in run.flags


def test_the_served_arithmetic_counts_on_gpus_only_where_graphs_were_captured() -> None:
    found = {item.label: item.required for item in of_ranks("cuda", "full", 2)}
    assert found["ranks 2 ref"] == found["ranks 2 tensor ref"] == {RANKS: 2, CAPTURED_SIZES: 1}
    assert found["ranks 2"] == found["ranks 2 tensor"] == {RANKS: 2}


ONE_SHORT = "2 ranks need 2 GPUs, this process has places for 1; DEEPINFER_RANKS_PER_GPU lets several take turns on one"


@pytest.mark.parametrize(("num_places", "reason"), [(1, ONE_SHORT), (2, "")])
def test_too_few_gpus_are_the_reason_that_nothing_is_run(num_places: int, reason: str) -> None:
    found = of_ranks("cuda", "quick", num_places)
    cases = tuple(Case(relation=relation, configuration=item) for item in found for relation in item.relations)
    assert {case.not_applicable for case in cases} == {reason}
    schedules = Plan(cases=cases, options=Options(device="cuda")).schedules(cases, has_mutants=False)
    assert len(schedules) == (0 if reason else 2 + len(cases))  # with the probes alone in each arithmetic


def test_the_cpu_needs_no_gpu() -> None:
    assert {item.not_applicable for item in of_ranks("cpu", "full", 0)} == {""}
