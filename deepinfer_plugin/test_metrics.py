"""Figures: the balance by hand, from one process to another, on vLLM's plug point, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_plugin import answer_provenance, envs, metrics
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.metrics import (
    BALANCE_METRICS,
    METRICS,
    WORKER_METRICS,
    Metric,
    MoeBalance,
    PublishedFigures,
    Publisher,
)
from deepinfer_plugin.replay import counters, series
from deepinfer_plugin.speculative import series as draft_series
from deepinfer_plugin.speculative.counters import Verification

HITS = Metric(name="deepinfer_x_hits_total", kind="counter", meaning="hits")
SIZE = Metric(name="deepinfer_x_size_bytes", kind="gauge", meaning="size")


def test_the_balance_is_the_slowest_rank_over_the_mean() -> None:
    balance = MoeBalance(num_steps=2)
    balance.add_step([[4, 0], [1, 3]])  # slowest 4 + 3, mean 2 + 2
    assert balance.ratio is None
    balance.add_step([[2, 2]])  # slowest 2, mean 2
    assert balance.ratio == 9 / 6
    for _ in range(2):
        balance.add_step([[5, 5, 5, 5]])
    assert balance.ratio == 1.0  # a new interval knows nothing of the last
    for _ in range(2):
        balance.add_step([[0, 0]])
    assert balance.ratio is None
    single = MoeBalance()
    for _ in range(metrics.MOE_LB_STEPS):
        single.add_step([[7]])
    assert (metrics.MOE_LB_STEPS, single.ratio) == (128, 1.0)


@pytest.mark.parametrize("name", ["hits_total", "deepinfer_hits"])
def test_a_counter_that_is_not_named_like_one_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"name of a counter is '{name}'"):
        Metric(name=name, kind="counter", meaning="")


def test_a_gauge_that_is_named_like_a_counter_is_refused() -> None:
    with pytest.raises(SettingError, match="name of a gauge"):
        Metric(name="deepinfer_hits_total", kind="gauge", meaning="")


def test_a_name_is_registered_once() -> None:
    publisher = Publisher()
    publisher.register([HITS], lambda: {HITS.name: 1})
    for taken in (HITS, METRICS[0]):
        with pytest.raises(SettingError, match=f"{taken.name} is registered twice"):
            publisher.register([taken, SIZE], dict)
    publisher.register([HITS], lambda: {HITS.name: 2})  # the next engine of the process
    assert [source() for _, source in publisher.sources] == [{HITS.name: 2}]


def test_replay_hands_over_its_counts() -> None:
    assert {metric.name for metric in series.SERIES} == set(series.figures())
    counts = set(asdict(counters.snapshot())) - {"steps", "rows"}  # those are ours and vLLM's already
    assert {name.removeprefix("deepinfer_replay_").removesuffix("_total") for name in series.figures()} == counts


def test_figures_of_several_processes_meet_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publishers = []
    for number in (1, 2):
        publisher = Publisher()
        publisher.register([HITS, SIZE], lambda number=number: {HITS.name: 10 * number, SIZE.name: number})  # type: ignore[misc]
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        assert publisher.publish(tmp_path, now_s=5.0)
        publishers.append(publisher)
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert not publishers[0].publish(tmp_path, now_s=5.9)
    assert publishers[0].publish(tmp_path, now_s=6.0)
    assert not Publisher().publish(tmp_path, now_s=9.0)
    assert not publishers[0].publish(None, now_s=99.0)
    (tmp_path / "3.json").write_text("cut off")
    found = {family.name: family for family in PublishedFigures(tmp_path).collect()}
    assert [(name, family.type) for name, family in found.items()] == [
        ("deepinfer_x_hits", "counter"),
        ("deepinfer_x_size_bytes", "gauge"),
    ]
    assert found["deepinfer_x_hits"].samples[0].name == HITS.name
    assert found["deepinfer_x_hits"].samples[0].value == 30
    assert found["deepinfer_x_size_bytes"].samples[0].value in (1, 2)
    assert publishers[0].publish(tmp_path / "gone", now_s=100.0)  # nobody reads any more: not an error
    assert metrics.published(tmp_path, SIZE) in (1, 2)
    assert metrics.published(None, SIZE) is None


def test_a_gauge_without_a_figure_yet_is_left_out(tmp_path: Path) -> None:
    publisher, figures = Publisher(), {HITS.name: 1.0}
    publisher.register([HITS, SIZE], lambda: figures)
    assert publisher.publish(tmp_path, now_s=5.0)
    assert metrics.published(tmp_path, SIZE) is None
    figures[SIZE.name] = 4.0
    assert publisher.publish(tmp_path, now_s=6.0)
    assert metrics.published(tmp_path, SIZE) == 4.0


def _drafts(counts: Verification, *steps: tuple[int, int, float]) -> None:
    """Steps of one request: drafts verified of two, accepted, and the confidence of each."""
    for verified, accepted, confidence in steps:
        counts.add_drafted(np.array([2]), 2)
        starts = torch.tensor([0, verified + 1], dtype=torch.int32)
        said = torch.full((1, 2), confidence)
        counts.add_step(starts, torch.tensor([accepted + 1], dtype=torch.int32), 2, said)


def test_acceptance_divides_by_verified_drafts_per_position_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, publisher = [Verification(), Verification()], Publisher()
    sources = [draft_series.DraftSeries(str(engine), own) for engine, own in enumerate(counts)]
    _drafts(counts[0], (2, 2, 1.0), (2, 1, 1.0), (1, 1, 0.75), (1, 0, 0.75), (0, 0, 0.5))
    _drafts(counts[1], (2, 0, 0.25))
    for engine, source in enumerate(sources):
        monkeypatch.setattr("os.getpid", lambda engine=engine: engine)
        publisher.sources = []
        publisher.register(draft_series.SERIES, source.figures)
        assert publisher.publish(tmp_path, now_s=5.0 + engine)
    found = _samples(tmp_path)
    assert {at: found["deepinfer_drafts_drafted_total", *at] for at in (("0", "0"), ("0", "1"))} == {
        ("0", "0"): 5,
        ("0", "1"): 5,
    }
    assert found["deepinfer_drafts_verified_total", "0", "1"] == 2
    assert found["deepinfer_draft_acceptance_ratio", "0", "0"] == 3 / 4
    assert found["deepinfer_draft_acceptance_ratio", "0", "1"] == 1 / 2
    assert found["deepinfer_draft_verified_length_tokens", "0"] == 1 + 6 / 5
    assert found["deepinfer_draft_accepted_length_tokens", "0"] == 1 + 4 / 5
    assert found["deepinfer_draft_confidence_error_ratio", "0", "0"] == (0 + 0 + 0.25 + 0.75) / 4
    assert found["deepinfer_draft_confidence_error_ratio", "0", "1"] == (0 + 1.0) / 2
    assert found["deepinfer_draft_acceptance_ratio", "1", "0"] == 0
    assert found["deepinfer_draft_confidence_error_ratio", "1", "0"] == 0.25
    assert ("deepinfer_draft_confidence_error_ratio", "1", "1") not in found, "the draft before it does not stand"


def test_gauges_of_drafts_are_those_of_the_interval_and_stay_while_nothing_happens(tmp_path: Path) -> None:
    counts, publisher = Verification(), Publisher()
    publisher.register(draft_series.SERIES, draft_series.DraftSeries("0", counts).figures)
    publisher.publish(tmp_path, now_s=1.0)
    assert _samples(tmp_path) == {("deepinfer_draft_steps_total", "0"): 0}
    for now_s, accepted in ((2.0, 0), (3.0, 2)):
        _drafts(counts, (2, accepted, 0.5))
        publisher.publish(tmp_path, now_s=now_s)
        publisher.publish(tmp_path, now_s=now_s + 0.5)
        publisher.publish(tmp_path, now_s=now_s + 0.9)
    publisher.publish(tmp_path, now_s=9.0)
    found = _samples(tmp_path)
    assert (found["deepinfer_draft_steps_total", "0"], found["deepinfer_drafts_verified_total", "0", "0"]) == (2, 2)
    assert found["deepinfer_draft_acceptance_ratio", "0", "0"] == 1
    assert found["deepinfer_draft_accepted_length_tokens", "0"] == 3


def _samples(folder: Path) -> dict[tuple[str, ...], float]:
    """What the server shows, by name and values of the labels."""
    families = PublishedFigures(folder).collect()
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_folder_is_made_once_and_shared_with_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_METRICS_DIR", "")
    envs.prepare_metrics_folder()
    folder = envs.metrics_folder()
    assert folder is not None
    assert folder.is_dir()
    envs.prepare_metrics_folder()
    assert envs.metrics_folder() == folder
    assert envs.child_environment()["DEEPINFER_METRICS_DIR"] == str(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPINFER_METRICS_DIR", str(tmp_path / "file" / "x"))
    with pytest.raises(SettingError, match=r"DEEPINFER_METRICS_DIR is .*cannot be made"):
        envs.prepare_metrics_folder()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stat logger on a registry of its own."""
    from prometheus_client import CollectorRegistry

    from deepinfer_plugin import stat_logger

    own = CollectorRegistry()
    monkeypatch.setattr(stat_logger, "REGISTRY", own)
    for name in ("Counter", "Gauge"):
        kind = getattr(stat_logger, name)
        monkeypatch.setattr(stat_logger, name, lambda *a, kind=kind, **k: kind(*a, registry=own, **k))
    monkeypatch.setattr(answer_provenance._NOTED, "facts", {"kernel_set": "reference", "certificate": None})
    monkeypatch.delenv("DEEPINFER_METRICS_DIR", raising=False)
    stat_logger._series.cache_clear()
    yield own
    stat_logger._series.cache_clear()


def steps(logger: Any, count: int) -> None:
    """``count`` steps of 3 prompt and 2 generated tokens."""
    for _ in range(count):
        cache = SimpleNamespace(queries=4, hits=1)
        scheduler = SimpleNamespace(
            num_running_reqs=5,
            num_waiting_reqs=6,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=0.25,
            prefix_cache_stats=cache,
        )
        iteration = SimpleNamespace(
            prompt_token_stats=SimpleNamespace(computed=3),
            num_generation_tokens=2,
            num_preempted_reqs=1,
            time_to_first_tokens_iter=[0.5],
        )
        logger.record(scheduler, iteration)
        logger.record(None, None)


def config(model_type: str) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)))


@pytest.mark.parametrize(("interval", "lines"), [("3", 2), ("0", 0), ("7", 1), ("8", 0)])
def test_every_interval_of_steps_gives_one_line_and_the_series(
    registry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interval: str, lines: int
) -> None:
    from deepinfer_plugin import stat_logger

    records: list[str] = []
    told = SimpleNamespace(info=lambda text, *values: records.append(text % values))
    monkeypatch.setattr(stat_logger, "logger", told)
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", interval)
    monkeypatch.setenv("DEEPINFER_METRICS_DIR", str(tmp_path))
    row = {"name": metrics.MOE_LB.name, "kind": "gauge", "meaning": "", "labels": [], "label_values": [], "value": 1.25}
    (tmp_path / "1.json").write_text(json.dumps([row]), encoding="utf-8")
    steps(stat_logger.DeepInferStatLogger(config("deepseek_v41"), 0), 7)
    assert (
        len([line for line in records if line.startswith(f"DeepInfer engine 0: {interval} steps, running 5")]) == lines
    )
    value = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
    assert (value["deepinfer_steps_total"], value["deepinfer_preemptions_total"]) == (7, 7)
    assert (value["deepinfer_running_requests"], value["deepinfer_waiting_requests"]) == (5, 7)
    assert value["deepinfer_kv_use_ratio"] == 0.25
    if lines:
        assert (value["deepinfer_prefix_hit_ratio"], value["deepinfer_first_token_seconds"]) == (0.25, 0.5)
        ratio = value["deepinfer_prompt_tokens_per_second"] / value["deepinfer_generation_tokens_per_second"]
        assert ratio == pytest.approx(1.5)
        assert "preempted" in records[-1]
        assert "prefix_hit_ratio 0.25" in records[-1]
        assert "moe_lb_ratio 1.25" in records[-1]


def test_another_model_has_no_series(registry: Any) -> None:
    from deepinfer_plugin.stat_logger import DeepInferStatLogger

    steps(DeepInferStatLogger(config("llama"), 0), 200)
    assert list(registry.collect()) == []


def test_the_series_say_what_serves(registry: Any) -> None:
    from deepinfer_plugin.stat_logger import DeepInferStatLogger

    DeepInferStatLogger(config("deepseek_v41"), 3)
    [labels] = [s.labels for family in registry.collect() for s in family.samples if s.name == "deepinfer_info"]
    assert (labels["engine"], labels["kernel_set"], labels["certificate"]) == ("3", "reference", "None")


def test_every_series_of_the_dashboard_exists() -> None:
    text = (Path(__file__).parent / "grafana" / "deepinfer.json").read_text(encoding="utf-8")
    board = json.loads(text)
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"[a-z]+_[a-z_]+(?=\{)", text)}
    every = (*METRICS, *WORKER_METRICS, *BALANCE_METRICS, *series.SERIES, *draft_series.SERIES)
    known = {metric.name for metric in every}
    assert len(asked) > 8
    assert asked - known == set()
    assert known - asked == set()  # and none is left out
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
