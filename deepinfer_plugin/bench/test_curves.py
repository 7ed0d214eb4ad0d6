"""The curves: steps and rates by hand, measured beside converted, files, and bad arguments in one line."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.__main__ import main
from deepinfer_plugin.bench import served
from deepinfer_plugin.bench.cases import Case, Figures, decode
from deepinfer_plugin.bench.curves import (
    Assumption,
    Point,
    charts,
    parse_sizes,
    prefill_case,
    to_csv,
    to_text,
)
from deepinfer_plugin.bench.plot import line_chart
from deepinfer_plugin.cli import bench_curves
from deepinfer_plugin.errors import EngineError, SettingError


@pytest.mark.parametrize(
    ("batch", "context", "requests", "steps"),
    [(4096, 131072, 1, 32), (4096, 4096, 1, 1), (8192, 4096, 2, 1), (4096, 4097, 1, 2), (4096, 4095, 1, 1)],
)
def test_a_prefill_fills_its_steps(batch: int, context: int, requests: int, steps: int) -> None:
    case = prefill_case(batch, context)
    assert (case.num_requests, case.context, case.is_prefill) == (requests, context, True)
    point = Point.from_rate(case, batch, tokens_per_s=1000.0)
    assert point.step_time_s == pytest.approx(requests * context / 1000.0 / steps)


def test_a_user_gets_one_token_a_step_and_the_converted_value_states_its_assumption() -> None:
    point = Point.from_rate(decode(16, 8192), 16, tokens_per_s=800.0)
    assert point.step_time_s == 0.02
    row = point.to_row(Assumption())
    assert (row["tokens_per_s"], row["user_tokens_per_s"], row["step_time_ms"]) == (800.0, 50.0, 20.0)
    assert (row["converted_tokens_per_s"], row["converted_user_tokens_per_s"]) == (2600.0, 162.5)
    assert Assumption().factor == 3.25
    assert "1 + 3 drafts x 0.75 accepted" in Assumption().to_json()["text"]
    assert Assumption(drafts=0).factor == Assumption(acceptance=0.0).factor == 1.0
    prefill = Point.from_rate(prefill_case(4096, 4096), 4096, 10.0).to_row(Assumption())
    assert prefill["user_tokens_per_s"] is prefill["converted_tokens_per_s"] is None


@pytest.mark.parametrize("values", [{"drafts": -1}, {"acceptance": -0.01}, {"acceptance": 1.01}])
def test_an_assumption_outside_its_bounds_is_refused(values: dict[str, Any]) -> None:
    assert Assumption(drafts=0, acceptance=1.0).factor == 1.0
    with pytest.raises(SettingError, match=f"--{next(iter(values))} is"):
        Assumption(**values)


def test_sizes_are_ascending_integers() -> None:
    assert parse_sizes("--x", "1,2,30") == (1, 2, 30)
    for text in ("", "0", "1,1", "2,1", "1,", "a", "-1", "1.0", "1, 2", "٣"):
        with pytest.raises(SettingError, match="--x is"):
            parse_sizes("--x", text)


POINTS = [
    Point.from_rate(prefill_case(4096, 8192), 4096, 5000.0),
    Point.from_rate(decode(1, 64), 1, 40.0),
    Point.from_rate(decode(8, 64), 8, 200.0),
]


def test_tables_and_charts_show_measured_values_first() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(POINTS, Assumption()))))
    assert [row["tokens_per_s"] for row in rows] == ["5000.0", "40.0", "200.0"]
    assert rows[0]["converted_tokens_per_s"] == ""
    assert list(rows[0]).index("tokens_per_s") < list(rows[0]).index("converted_tokens_per_s")
    text = to_text(POINTS, Assumption())
    assert "200.0       25.0        650.0" in text
    assert "nothing of it was measured" in text
    found = charts(POINTS, Assumption())
    assert set(found) == {"prefill", "decode"}
    x_title, y_title, series = found["decode"]
    assert series[0] == ("measured", [(40.0, 40.0), (25.0, 200.0)])
    assert series[1][0] == "converted x 3.25, not measured"
    svg = line_chart("a < b", x_title, y_title, series)
    tree = xml.etree.ElementTree.fromstring(svg)
    kinds = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert kinds.count("circle") == 4
    assert "not measured" in svg
    assert set(charts(POINTS[:1], Assumption())) == {"prefill"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Engines that answer at once; what each was started with."""
    started: list[dict[str, Any]] = []

    def run_side(side: str, model: Path, cases: list[Case], engine: dict[str, Any], *rest: Any) -> Figures:
        started.append({"side": side, "cases": cases, "model": model, **engine})
        rates = {case.name: 100.0 for case in cases if case.num_requests < 64}
        refused = {case.name: "no room" for case in cases if case.num_requests >= 64}
        return Figures(side=side, start_s=1.0, kv_tokens=1, tokens_per_s=rates, not_run=refused)

    monkeypatch.setattr(bench_curves, "run_side", run_side)
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    return started


def test_a_sweep_writes_both_curves(
    checkpoint: Callable[..., Path], tmp_path: Path, engines: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-tokens", "32,64", "--context", "96", "--requests", "1,4,64", "--decode-context", "16"]
    out = tmp_path / "out"
    arguments = ["bench", "sweep", "--model", str(checkpoint("nano", 0)), "--out", str(out), *flags]
    assert main([*arguments, "--engine", '{"enforce_eager": true}']) == 0
    assert [engine.get("max_num_batched_tokens") for engine in engines] == [32, 64, None]
    assert all(engine["enforce_eager"] and engine["load_format"] == "auto" for engine in engines)
    record = json.loads((out / "curves.json").read_text())
    assert [(row["kind"], row["batch"], row["tokens_per_s"]) for row in record["points"]] == [
        ("prefill", 32, 100.0),
        ("prefill", 64, 100.0),
        ("decode", 1, 100.0),
        ("decode", 4, 100.0),
    ]
    assert record["assumption"]["factor"] == 3.25
    assert {path.name for path in out.iterdir()} == {"curves.json", "curves.csv", "prefill.svg", "decode.svg"}
    text = capsys.readouterr().out
    assert "decode 64 at 16 was not run: no room" in text
    assert "nothing of it was measured" in text
    nothing = ["bench", "decode", "--model", str(checkpoint("nano", 0)), "--out", str(out), "--requests", "64"]
    assert main(nothing) == 2
    assert "no case could be run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "flags", "text"),
    [
        ("prefill", ["--batch-tokens", "0"], "--batch-tokens is '0'"),
        ("prefill", ["--context", "0"], "--context is 0, expected 1 or more"),
        ("decode", ["--requests", "2,1"], "--requests is '2,1'"),
        ("decode", ["--decode-context", "0"], "--decode-context is 0"),
        ("decode", ["--new-tokens", "1"], "--new-tokens is 1, expected 2 or more"),
        ("decode", ["--acceptance", "1.5"], "--acceptance is 1.5, expected 0 to 1"),
        ("decode", ["--drafts", "-1"], "--drafts is -1, expected 0 or more"),
        ("sweep", ["--base-url", "http://x"], "one of --base-url and --served-model-name is missing"),
        ("sweep", ["--out", "/proc/no/such"], "--out is /proc/no/such, which cannot be made"),
        ("sweep", ["--model", "/none"], "the checkpoint is /none, which has no config.json"),
    ],
)
@pytest.mark.usefixtures("engines")
def test_a_bad_argument_is_one_line_and_exit_code_2(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    flags: list[str],
    text: str,
) -> None:
    arguments = ["bench", kind, "--model", str(checkpoint("nano", 0)), "--out", str(tmp_path / "out"), *flags]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


TOOL = """
import json, sys
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv if "=" in word)
users = int(flags["max-concurrency"])
completed = int(flags["num-prompts"]) - int(MISSING)
result = {"completed": completed, "mean_tpot_ms": 20.0, "output_throughput": 45.0 * users}
open(flags["result-dir"] + "/" + flags["result-filename"], "w").write(json.dumps(result))
"""


def test_a_server_is_measured_with_vllms_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def stand_in(missing: int) -> Callable[..., Any]:
        code = TOOL.replace("MISSING", str(missing))
        return lambda command, **rest: real([sys.executable, "-c", code, *command], **rest)

    monkeypatch.setattr(subprocess, "run", stand_in(0))
    point = served.measure("http://x", tmp_path, "m", 4, 32, 8, tmp_path)
    assert (point.batch, point.step_time_s, point.tokens_per_s) == (4, 0.02, 180.0)
    monkeypatch.setattr(subprocess, "run", stand_in(1))
    with pytest.raises(EngineError, match="1 of 16 requests failed"):
        served.measure("http://x", tmp_path, "m", 4, 32, 8, tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: real([sys.executable, "-c", "1/0"], **rest))
    with pytest.raises(EngineError, match="code 1 and no result"):
        served.measure("http://x", tmp_path, "m", 5, 32, 8, tmp_path)
