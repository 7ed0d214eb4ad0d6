"""The budget rule against DeepInfer's table, and what must hold of it whatever is assumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_plugin.bench.curves import Assumption
from deepinfer_plugin.errors import InputError
from deepinfer_plugin.speculative import simulate as module
from deepinfer_plugin.speculative.budget import verified_lengths
from deepinfer_plugin.speculative.simulate import GAINS_FROM, TABLE, Load, Model, disagreements, main, simulate

STEPS = 120
LOADS = (8, 16, 32, 64, 96)


def _loads(model: Model, loads: tuple[int, ...] = LOADS) -> list[Load]:
    return [simulate(model, num_reqs, STEPS, 0) for num_reqs in loads]


def test_gains_have_sign_and_order_of_the_table_and_come_near_it() -> None:
    loads = _loads(Model())
    assert disagreements(loads) == []
    for load in loads:
        assert load.gain == pytest.approx(TABLE.get(load.num_reqs, load.gain), abs=0.015)
        assert load.fixed.length == pytest.approx(Assumption().factor, rel=0.02)


@pytest.mark.parametrize("spread", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("row_s", [12e-6, 13.3e-6, 15e-6])
def test_sign_and_order_do_not_hang_on_what_was_chosen(spread: float, row_s: float) -> None:
    wrong = disagreements(_loads(Model(spread=spread, row_s=row_s)))
    assert [text for text in wrong if "fewer tokens" not in text] == []


@pytest.mark.parametrize("spread", [0.2, 0.7, 5.0])
def test_a_schedule_that_costs_nothing_never_loses(spread: float) -> None:
    gains = [load.gain for load in _loads(Model(spread=spread, schedule_s=0.0))]
    assert gains[0] >= 0.0
    assert gains == sorted(gains), "more at a higher load"


def test_fewer_drafts_are_verified_at_a_higher_load_and_where_rows_cost_more() -> None:
    by_load = [load.scheduled.verified for load in _loads(Model())]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] > by_load[-1]
    by_cost = [simulate(Model(row_s=row_s), 32, STEPS, 0).scheduled.verified for row_s in (1e-9, 5e-6, 2e-5, 1e-3, 0.1)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert by_cost[0] > 4.9
    assert by_cost[-1] < 2.0


def test_the_more_chances_differ_the_more_is_gained() -> None:
    gains = [simulate(Model(spread=spread), 96, STEPS, 0).gain for spread in (5.0, 1.0, 0.5, 0.25)]
    assert gains == sorted(gains)


@pytest.mark.parametrize("total", range(13))
def test_equal_chances_are_verified_by_place_then_by_request(total: int) -> None:
    """Alike requests: the shorter prefix first, and of one place the lower request."""
    chances = np.full((4, 3), 0.5)
    times = np.where(np.arange(32) <= 4 + total, 1.0, 1e6)
    found = verified_lengths(chances, np.full(4, 3), 4, 4, times)
    assert found.tolist() == [(total + 3 - request) // 4 for request in range(4)]


def test_a_simulation_is_a_function_of_its_seed() -> None:
    first, again = (simulate(Model(), 16, 20, 3) for _ in range(2))
    assert first == again
    assert first != simulate(Model(), 16, 20, 4)


def _all(chances: np.ndarray, num_drafts: np.ndarray, *args: Any) -> np.ndarray:
    return num_drafts


def _upside_down(chances: np.ndarray, *args: Any) -> np.ndarray:
    return verified_lengths(1.0 - chances, *args)


def _half(chances: np.ndarray, num_drafts: np.ndarray, *args: Any) -> np.ndarray:
    return num_drafts // 2


@pytest.mark.parametrize("rule", [_all, _upside_down, _half])
def test_another_rule_does_not_have_the_gains_of_the_table(
    rule: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "verified_lengths", rule)
    assert disagreements(_loads(Model())) != []


@pytest.mark.parametrize("gains", [{16: 0.01}, {32: -0.001}, {96: -0.1}, {32: 0.2}])
def test_a_gain_of_another_sign_or_order_is_named(gains: dict[int, float]) -> None:
    loads = _loads(Model(), (16, 32, 96))
    assert disagreements(loads) == []
    changed = [_with_gain(load, gains.get(load.num_reqs, load.gain)) for load in loads]
    text = disagreements(changed)[0]
    assert text.startswith(f"{min(gains)} requests: gain" if gains != {32: 0.2} else "gains are")


def _with_gain(load: Load, gain: float) -> Load:
    step_s = load.scheduled.length / (load.fixed.rate * (1.0 + gain))
    scheduled = module.Side(verified=load.scheduled.verified, length=load.scheduled.length, step_s=step_s)
    return Load(num_reqs=load.num_reqs, fixed=load.fixed, scheduled=scheduled)


def test_the_command_writes_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "new"), "--requests", "8,128", "--steps", "40"]) == 0
    report = json.loads((tmp_path / "new" / "simulation.json").read_text())
    assert [load["num_reqs"] for load in report["loads"]] == [8, *sorted({*TABLE, GAINS_FROM}), 128]
    assert report["model"] == {**asdict(Model()), "mean_chance": Model().mean_chance}
    assert report["disagreements"] == []
    svg = (tmp_path / "new" / "simulation.svg").read_text()
    assert svg.count("<circle") == len(report["loads"]) + len(TABLE)
    assert "sign and order are those of DeepInfer's table" in capsys.readouterr().out


def test_a_stored_curve_takes_the_place_of_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps({"form": 1, "rows": [1, 4000], "times_s": [0.01, 0.01], "largest_graph": 0}))
    assert main(["--out", str(tmp_path), "--steps", "2", "--curve", str(flat)]) == 1
    assert "96 requests: gain -" in capsys.readouterr().out, "rows that cost nothing leave nothing to gain"
    report = json.loads((tmp_path / "simulation.json").read_text())
    assert report["curve"]["times_s"] == [0.01, 0.01]
    assert {load["fixed"]["step_s"] for load in report["loads"]} == {0.01}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--requests", "8,4"], "--requests is '8,4'"),
        (["--spread", "0"], "is not positive"),
        (["--schedule-s", "-1"], "is not positive"),
        (["--curve", "/nowhere.json"], "--curve /nowhere.json cannot be used"),
    ],
)
def test_a_bad_argument_is_named(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert expected in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_no_chance_gives_is_refused() -> None:
    for length in (1.0, 6.0):
        with pytest.raises(InputError, match="a length between 1 and drafts"):
            Model(length=length)
