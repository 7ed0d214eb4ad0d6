"""The comparison's arithmetic, and a run of both ends that needs no GPU."""

from pathlib import Path

import pytest

from deepinfer_plugin.bench.cases import CASES, Figures, decode, prefill, select
from deepinfer_plugin.bench.peer import engine_arguments, ratios, run_side, table
from deepinfer_plugin.bench.plot import ratio_chart
from deepinfer_plugin.conftest import CheckpointFixture
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


def test_ratios_need_both_sides() -> None:
    assert ratios([_figures("ours", 30)]) == {}
    assert ratios([_figures("ours", 30), _figures("vllm", 20)]) == {"decode 1 at 256": 1.5}


def test_the_table_says_why_a_case_was_not_run() -> None:
    figures = Figures(side="ours", start_s=1.0, kv_tokens=5, not_run={"decode 1 at 256": "no time"})
    assert "not run, ours: decode 1 at 256: no time" in table([figures])
    assert "| decode 1 at 256, tokens/s | not run | not run |  |" in table([figures])


def test_both_sides_get_the_same_room_and_only_what_differs_differs(tmp_path: Path) -> None:
    ours, theirs = (engine_arguments(side, tmp_path, CASES, {"seed": 3}) for side in ("ours", "vllm"))
    assert {**theirs, **ours} == theirs
    assert set(theirs) - set(ours) == {"limit_mm_per_prompt", "block_size"}
    assert ours["max_model_len"] >= 65536 + 96
    assert ours["max_num_seqs"] == 256


def test_our_side_times_what_fits_and_says_what_does_not(checkpoint: CheckpointFixture, tmp_path: Path) -> None:
    cases = (prefill(2, 16), decode(2, 8), decode(9, 1 << 14), decode(1 << 16, 512))
    engine = {"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 2048}
    figures = run_side("ours", checkpoint("nano", 0), cases, engine, tmp_path / "log", 600.0)
    assert set(figures.tokens_per_s) == {"prefill 2 x 16", "decode 2 at 8"}, (tmp_path / "log").read_text()[-2000:]
    assert min(figures.tokens_per_s.values()) > 0
    assert figures.kv_tokens > 0
    assert "max_model_len is 2048" in figures.not_run["decode 9 at 16384"]
    assert "the cache holds" in figures.not_run["decode 65536 at 512"]


def test_a_side_without_time_keeps_its_start_and_names_every_case(
    checkpoint: CheckpointFixture, tmp_path: Path
) -> None:
    engine = {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 64, "max_model_len": 2048}
    figures = run_side("ours", checkpoint("nano", 0), (decode(1, 8),), engine, tmp_path / "log", 1.0)
    assert figures.start_s > 0
    assert "s are left" in figures.not_run["decode 1 at 8"]


def test_an_engine_that_does_not_start_leaves_its_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 8}}', encoding="utf-8")
    with pytest.raises(EngineError, match="side 'ours' ended with code"):
        run_side("ours", tmp_path, (decode(1, 8),), {}, tmp_path / "log", 60.0)
    assert (tmp_path / "log").stat().st_size > 0
