"""Names and units of our gauges and counters, and how a process hands its figures to the server's ``/metrics``.

vLLM computes in processes of its own. A process there registers a source (``PUBLISHER.register``), a function that
returns its figures, and calls ``publish`` once a step; at most once a second that writes one small file into a folder
which the server made. ``PublishedFigures`` reads the folder when ``/metrics`` is asked. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from deepinfer_plugin.errors import SettingError

PREFIX = "deepinfer_"
PUBLISH_EVERY_S = 1.0
MOE_LB_STEPS = 128  # steps of one interval of the figure, as DeepInfer counts them

Values = float | Mapping[tuple[str, ...], float]  # of a series with labels: one value for each of their values
Source = Callable[[], Mapping[str, Values]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One series. A counter's name ends in ``_total``, every name in the unit of its value or in what is counted."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith(PREFIX) or (self.kind == "counter") is not self.name.endswith("_total"):
            raise SettingError(
                f"metrics: the name of a {self.kind} is {self.name!r}, expected {PREFIX}… and _total for counters only"
            )


def _gauge(name: str, meaning: str) -> Metric:
    return Metric(name=PREFIX + name, kind="gauge", meaning=meaning)


def _counter(name: str, meaning: str) -> Metric:
    return Metric(name=PREFIX + name, kind="counter", meaning=meaning)


STEPS = _counter("steps_total", "engine steps")
PREEMPTIONS = _counter("preemptions_total", "requests that were preempted")
RUNNING = _gauge("running_requests", "requests in the running batch")
WAITING = _gauge("waiting_requests", "requests that wait")
KV_USE = _gauge("kv_use_ratio", "used part of the KV cache, 0 to 1")
STEP_RATE = _gauge("steps_per_second", "engine steps per second, over the last interval")
PROMPT_RATE = _gauge("prompt_tokens_per_second", "prompt tokens computed per second, over the last interval")
GENERATION_RATE = _gauge("generation_tokens_per_second", "tokens generated per second, over the last interval")
PREFIX_HITS = _gauge("prefix_hit_ratio", "prompt tokens found in the prefix cache, 0 to 1, over the last interval")
FIRST_TOKEN = _gauge("first_token_seconds", "mean time to the first token, over the last interval")
INFO = _gauge("info", "always 1; the labels say what serves")

# Of the process that computes; it publishes them.
ROWS = _counter("forward_rows_total", "rows that passed the model")
PADDING_ROWS = _counter("padding_rows_total", "rows that passed the model to fill up a CUDA graph")
MOE_LB = _gauge("moe_lb_ratio", "tokens of the slowest rank over the mean of the ranks, summed over 128 steps; 1: even")
MOVES = _counter("expert_moves_total", "times that experts were moved between ranks")

METRICS: tuple[Metric, ...] = (
    STEPS,
    PREEMPTIONS,
    RUNNING,
    WAITING,
    KV_USE,
    STEP_RATE,
    PROMPT_RATE,
    GENERATION_RATE,
    PREFIX_HITS,
    FIRST_TOKEN,
    INFO,
)
WORKER_METRICS: tuple[Metric, ...] = (ROWS, PADDING_ROWS)
# Of the first rank of an engine, or of those that have whole experts.
BALANCE_METRICS: tuple[Metric, ...] = (MOE_LB, MOVES)


class MoeBalance:
    """The figure ``moe_lb``: sum of the slowest rank's tokens over the sum of the mean, over steps and layers."""

    def __init__(self, num_steps: int = MOE_LB_STEPS) -> None:
        self._num_steps = num_steps
        self._steps = 0
        self._slowest = 0.0
        self._mean = 0.0
        self.ratio: float | None = None

    def add_step(self, tokens: Sequence[Sequence[float]]) -> None:
        """Count one step.

        Args:
            tokens: [num_layers][num_ranks], tokens that each rank's experts computed in each MoE layer.
        """
        for ranks in tokens:
            self._slowest += max(ranks)
            self._mean += sum(ranks) / len(ranks)
        self._steps += 1
        if self._steps == self._num_steps:
            self.ratio = self._slowest / self._mean if self._mean > 0 else None
            self._steps, self._slowest, self._mean = 0, 0.0, 0.0


@dataclass(slots=True)
class Publisher:
    """The sources of one process and the file that their figures go to."""

    sources: list[tuple[tuple[Metric, ...], Source]] = field(default_factory=list)
    last_s: float = -PUBLISH_EVERY_S

    def register(self, metrics: Sequence[Metric], source: Source) -> None:
        """Add a source, or put it in the place of one with the same metrics: that of an engine which is gone.

        Args:
            metrics: what it returns, by name.
            source: called at most once a second; its counters never fall, and a gauge without a value is left out.

        Raises:
            SettingError: a name is already registered in this process.
        """
        self.sources = [(found, before) for found, before in self.sources if found != tuple(metrics)]
        known = {metric.name for metric in METRICS} | {m.name for found, _ in self.sources for m in found}
        for metric in metrics:
            if metric.name in known:
                raise SettingError(f"metrics: {metric.name} is registered twice, expected a name of its own")
        self.sources.append((tuple(metrics), source))

    def publish(self, folder: Path | None, now_s: float) -> bool:
        """Write the figures where it is time; whether it wrote.

        Args:
            folder: from DEEPINFER_METRICS_DIR; None: nobody reads.
            now_s: a monotonic clock.
        """
        if folder is None or not self.sources or now_s - self.last_s < PUBLISH_EVERY_S:
            return False
        self.last_s = now_s
        rows: list[dict[str, Any]] = []
        for metrics, source in self.sources:
            values = source()
            for metric in metrics:
                value = values.get(metric.name, {})
                each: Mapping[tuple[str, ...], float] = value if isinstance(value, Mapping) else {(): value}
                rows += [{**asdict(metric), "label_values": at, "value": float(each[at])} for at in sorted(each)]
        path = folder / f"{os.getpid()}.json"
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # the server is gone, and with it the folder
            temporary.write_text(json.dumps(rows), encoding="utf-8")
            os.replace(temporary, path)
        return True


PUBLISHER = Publisher()


class PublishedFigures:
    """Collector of prometheus_client: counters of all processes summed, of a gauge the latest value.

    Not for ``--api-server-count`` above 1: vLLM then serves ``/metrics`` from files of prometheus_client alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """One family per metric that a process has published."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found: dict[str, tuple[Metric, dict[tuple[str, ...], float]]] = {}
        for path in sorted(self._folder.glob("*.json"), key=_changed_ns):
            for row in _read_rows(path):
                metric = Metric(name=row["name"], kind=row["kind"], meaning=row["meaning"], labels=tuple(row["labels"]))
                _, values = found.setdefault(metric.name, (metric, {}))
                at = tuple(row["label_values"])
                values[at] = row["value"] + (values.get(at, 0.0) if metric.kind == "counter" else 0.0)
        for name, (metric, values) in sorted(found.items()):
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=metric.labels)
            for at, value in sorted(values.items()):
                family.add_metric(at, value)
            yield family


def published(folder: Path | None, metric: Metric) -> float | None:
    """The latest value of a gauge that a process has published; None: there is none yet.

    Args:
        folder: from DEEPINFER_METRICS_DIR; None: nobody publishes.
        metric: the gauge.
    """
    paths = sorted(folder.glob("*.json"), key=_changed_ns) if folder is not None else []
    values = [row["value"] for path in paths for row in _read_rows(path) if row["name"] == metric.name]
    return float(values[-1]) if values else None


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return rows
