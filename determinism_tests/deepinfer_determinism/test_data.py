"""Schedules, results and workloads as data: what is written is read back, and what is damaged is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_determinism import schedule
from deepinfer_determinism.cases import Case
from deepinfer_determinism.configurations import configurations
from deepinfer_determinism.relations import RELATIONS, Setting, alone
from deepinfer_determinism.results import (
    CoverageRow,
    FirstDifference,
    MutantResult,
    OperationResult,
    RelationResult,
    RunResult,
    read_result,
    write_result,
)
from deepinfer_determinism.workload import Sizes, Workload, base_name, renamed
from deepinfer_plugin.errors import InputError

SIZES = Sizes(
    vocab_size=256,
    sliding_window=8,
    index_topk=4,
    candidate_entries=8,
    ratios=(1, 2),
    num_layers=7,
    num_rings=1,
)


def relation_result(**changes: object) -> RelationResult:
    result = RelationResult(
        relation="chunks",
        configuration="nano:0 ref cpu",
        rows_compared=3,
        differences=0,
        first_difference=None,
        mechanisms={"chunks": 2},
        exercised=True,
        seconds=1.5,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_every_schedule_is_read_as_it_was_written_and_has_a_name_of_its_own(depth: str, tmp_path: Path) -> None:
    found = configurations(Setting(), SIZES, depth, 3)
    cases = [Case(relation=relation, configuration=item) for item in found for relation in item.relations]
    schedules = [case.schedule for case in cases]
    schedules += {item.alone_name: item.alone for item in found}.values()
    for written in schedules:
        schedule.save(written, tmp_path / "s.json")
        assert schedule.load(tmp_path / "s.json") == written
    assert len({item.name for item in schedules}) == len(schedules)
    assert {case.relation.name for case in cases} >= {relation.name for relation in RELATIONS}


def test_a_restart_runs_apart_from_what_it_is_compared_with() -> None:
    (configuration, *_) = configurations(Setting(), SIZES, "quick", 3)
    apart = [Case(relation=item, configuration=configuration).schedule.apart_from for item in configuration.relations]
    assert sorted(set(apart)) == ["", configuration.alone_name]


def test_two_ranks_are_compared_with_one_in_every_set() -> None:
    for depth, least in (("quick", 1), ("full", 10)):
        found = [item for item in configurations(Setting(), SIZES, depth, 3) if item.label.startswith("ranks 2")]
        assert all(item.alone_name == "alone s32" for item in found)
        assert sum(len(item.relations) for item in found) >= least
        sizes = ("--tensor-parallel-size=2", "--pipeline-parallel-size=2")
        assert all(sum(size in item.setting.flags for size in sizes) == 1 and item.required for item in found)


def test_the_full_workload_repeats_and_holds_the_quick_one() -> None:
    quick, full = Workload.build(SIZES, 3), Workload.build_full(SIZES, 3)
    assert full == Workload.build_full(SIZES, 3)
    assert {probe.name for probe in quick.probes} <= {probe.name for probe in full.probes}
    assert Workload.build(SIZES, 4) != quick


def test_probes_stand_on_both_sides_of_every_edge() -> None:
    lengths = {len(probe.tokens) for probe in Workload.build(SIZES, 0).probes}
    for edge in (4, 8, 16, 32, 64, 128):
        assert {edge - 1, edge, edge + 1} <= lengths


def test_secrets_change_the_tokens_of_a_neighbour_and_nothing_else() -> None:
    workload = Workload.build(SIZES, 0)
    one, other = workload.neighbour("n0", 30, salt="a"), workload.neighbour("n0", 30, salt="b")
    assert one.tokens != other.tokens
    assert replace(one, tokens=()) == replace(other, tokens=())
    assert base_name(renamed(one, "again").name) == "n0"


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"kind": "x"}', "", '{"kind": "deepinfer_determinism schedule", "format": 1}']
)
def test_a_damaged_schedule_is_refused_with_its_path(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(damage, encoding="utf-8")
    with pytest.raises(InputError, match=r"s\.json"):
        schedule.load(path)


def test_a_fault_of_an_action_that_is_not_there_is_refused() -> None:
    written = alone(Workload.build(SIZES, 0), Setting()).to_json()
    written["action_faults"] = {"999": ["module:function"]}
    with pytest.raises(InputError, match="names action 999"):
        schedule.Schedule.from_json(written)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = FirstDifference(request="p8", position=3, got="a", want="b")
    run = RunResult(
        depth="quick",
        device="cpu",
        checkpoint="nano:0",
        workload_seed=0,
        relations=(relation_result(), relation_result(differences=1, first_difference=first)),
        operations=(OperationResult(operation="linear.linear", rows_compared=4, batches=2, differences=0),),
        mutants=(MutantResult(name="m", ran=1, caught_by="chunks"),),
        coverage=(CoverageRow(name="c", where="f.py: g", value="rows >= 16", below=1, above=1),),
    )
    write_result(run, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == run
    assert run.rows_compared == 6
    assert not run.is_passed
    assert replace(run, relations=run.relations[:1]).is_passed


def test_what_did_not_happen_is_no_pass() -> None:
    assert relation_result().outcome == "equal"
    assert relation_result(exercised=False).outcome == "not exercised"
    assert relation_result(rows_compared=0).outcome == "not exercised"
    assert relation_result(differences=1, exercised=False).outcome == "different"
    assert relation_result(not_applicable="no graphs").outcome == "not applicable"
    assert not MutantResult(name="m", ran=0, caught_by="chunks").is_killed
    assert not CoverageRow(name="c", where="f", value="v", below=0, above=3).is_covered


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"format": 0}), encoding="utf-8")
    with pytest.raises(InputError, match="format is 0"):
        read_result(path)
