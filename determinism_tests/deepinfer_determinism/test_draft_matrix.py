"""The matrix of drafts, schedules and circumstances; ``--depth full`` compares more than 20,000 generated tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.draft_cells import Cell, MatrixResult, compare_matrix
from deepinfer_determinism.draft_matrix import HIT, KINDS, LENGTHS, SAMPLED, SIZES, Combination
from deepinfer_determinism.draft_matrix_command import run_matrix

LEAST_ROWS = {"quick": 300, "full": 20_000}


@pytest.fixture(scope="module")
def matrix(depth: str, workload_seed: int) -> MatrixResult:
    return compare_matrix(run_matrix(depth, workload_seed), depth)


def test_no_bit_differs_and_every_cell_was_exercised(matrix: MatrixResult) -> None:
    assert matrix.faults() == []


def test_enough_tokens_were_compared(matrix: MatrixResult, depth: str) -> None:
    assert matrix.rows >= LEAST_ROWS[depth]
    size = SIZES[depth]
    assert len(matrix.cells) == len(KINDS) * len(size.circumstances) * len(size.combinations)


def test_the_full_matrix_has_every_number_of_drafts_under_every_schedule() -> None:
    of_blocks = {(item.num_drafts, item.schedule) for item in SIZES["full"].combinations if item.drafter is None}
    assert of_blocks == {*itertools.product((1, 3, 5), LENGTHS), (0, "fixed")}


def _cell(**changes: int) -> Cell:
    values: dict[str, Any] = {"rows": 9, "differences": 0, "happened": 2, **changes}
    return Cell(combination=Combination(num_drafts=5), circumstance=HIT, kind=SAMPLED, **values)


def test_what_differs_or_did_not_happen_is_named() -> None:
    counts = {m.ACCEPTED_DRAFTS: 3, "required": {m.ACCEPTED_DRAFTS: 1}}
    assert MatrixResult(cells=(_cell(),), drafts={"engine": counts}).faults() == []
    found = MatrixResult(
        cells=(_cell(differences=2), _cell(happened=0), _cell(rows=0)),
        drafts={"engine": {**counts, m.ACCEPTED_DRAFTS: 0}},
    )
    assert [fault.partition(", first")[0] for fault in found.faults()] == [
        "matrix 5 drafts fixed blocks, hit, sampled: 2 of 9 rows differ",
        "matrix 5 drafts fixed blocks, hit, sampled: not exercised: 0 requests, 9 rows",
        "matrix 5 drafts fixed blocks, hit, sampled: not exercised: 2 requests, 0 rows",
        "engine: not exercised: drafts accepted is 0",
    ]
    assert (found.rows, found.differences) == (18, 2)
