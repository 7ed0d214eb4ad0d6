"""The comparison's arithmetic, and a run of both ends that needs no GPU."""

from pathlib import Path

import pytest

from deepinfer_plugin.bench.cases import CASES, Figures, decode, prefill, select
from deepinfer_plugin.bench.peer import run_side, table
from deepinfer_plugin.bench.plot import ratio_chart
from deepinfer_plugin.errors import EngineError, SettingError


def _figures(side: str, rate: float) -> Figures:
    return Figures(side=side, start_s=10.0, kv_tokens=int(rate), tokens_per_s={"decode 1 at 256": rate})


def test_the_table_shows_medians_of_the_rounds_and_their_ratio() -> None:
    rounds = [
        _figures("ours", 30),
        _figures("vllm", 20),
        _figures("vllm", 10),
        _figures("ours", 50),
        _figures("ours", 40),
    ]
    assert "| decode 1 at 256, tokens/s | 40 | 20 | 2.00 |" in table(rounds)


def test_a_side_that_did_not_run_is_said_to_be_so() -> None:
    assert "| decode 1 at 256, tokens/s | 30 | not run |  |" in table([_figures("ours", 30)])


def test_cases_are_chosen_by_the_start_of_their_name() -> None:
    assert select(["prefill"]) == (prefill(8, 4096), prefill(2, 32768))
    assert select(None) == CASES
    with pytest.raises(SettingError, match="--case is 'training'"):
        select(["training"])


def test_the_chart_names_every_case_and_cuts_long_bars() -> None:
    chart = ratio_chart({"a < b": 0.5, "c": 9.0}, "title")
    assert "a &lt; b" in chart
    assert ">9.00<" in chart


def test_an_engine_that_does_not_start_leaves_its_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 8}}', encoding="utf-8")
    with pytest.raises(EngineError, match="side 'ours' ended with code"):
        run_side("ours", tmp_path, (decode(1, 8, 2),), {}, tmp_path / "log")
    assert (tmp_path / "log").stat().st_size > 0
