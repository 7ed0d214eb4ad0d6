"""vLLM's plug point for statistics (``vllm.stat_logger_plugins``): our series on ``/metrics`` and one line an interval.

It runs in the process of the server. On a model that is not ours it does nothing.
"""

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from deepinfer_plugin import __version__, answer_provenance, envs, metrics, variables
from deepinfer_plugin.metrics import METRICS
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.translate import MODEL_TYPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

GAUGE_STEPS = 100  # interval of the gauges where no line is wanted
INFO_LABELS = ("version", "kernel_set", "arithmetic", "settings_hash", "certificate")

logger = init_logger(f"vllm.{__name__}")


@functools.cache
def _series() -> dict[str, Any]:
    """The series of this process, made once: prometheus_client refuses a name twice."""
    folder = envs.metrics_folder()
    if folder is not None:
        REGISTRY.register(metrics.PublishedFigures(folder))
    found: dict[str, Any] = {}
    for metric in METRICS:
        labels = ("engine", *(INFO_LABELS if metric is metrics.INFO else ()))
        if metric.kind == "counter":
            found[metric.name] = Counter(metric.name, metric.meaning, labels)
        else:
            found[metric.name] = Gauge(metric.name, metric.meaning, labels, multiprocess_mode="mostrecent")
    return found


@dataclass(slots=True)
class _Interval:
    """Sums since the last line."""

    begin_s: float
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    queries: int = 0
    hits: int = 0
    first_tokens_s: list[float] = field(default_factory=list)


class DeepInferStatLogger(StatLoggerBase):
    """Statistics of one engine."""

    def __init__(self, vllm_config: "VllmConfig", engine_index: int = 0) -> None:
        settings = Settings.from_envs()
        model_type = getattr(vllm_config.model_config.hf_config, "model_type", "")
        self._is_on = model_type == MODEL_TYPE and settings.batch_invariant and not settings.disable
        self._engine = str(engine_index)
        self._line_steps = settings[variables.LOGGING_INTERVAL_STEP]
        self._interval = _Interval(begin_s=time.monotonic())
        if not self._is_on:
            return
        for metric in METRICS:
            if metric.kind == "counter":
                _series()[metric.name].labels(engine=self._engine)  # counted from 0, not from its first event
        facts = answer_provenance.facts()
        values = {name: str(facts.get(name)) for name in INFO_LABELS if name != "version"}
        _series()[metrics.INFO.name].labels(engine=self._engine, version=__version__, **values).set(1)

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        """vLLM calls it with what one step brought."""
        del mm_cache_stats, engine_idx
        if not self._is_on:
            return
        interval = self._interval
        if iteration_stats is not None:
            interval.prompt_tokens += iteration_stats.prompt_token_stats.computed
            interval.generation_tokens += iteration_stats.num_generation_tokens
            interval.preemptions += iteration_stats.num_preempted_reqs
            interval.first_tokens_s += iteration_stats.time_to_first_tokens_iter
            if iteration_stats.num_preempted_reqs:
                self._of(metrics.PREEMPTIONS).inc(iteration_stats.num_preempted_reqs)
        if scheduler_stats is None:
            return
        interval.steps += 1
        self._of(metrics.STEPS).inc()
        self._of(metrics.RUNNING).set(scheduler_stats.num_running_reqs)
        self._of(metrics.WAITING).set(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)
        self._of(metrics.KV_USE).set(scheduler_stats.kv_cache_usage)
        interval.queries += scheduler_stats.prefix_cache_stats.queries
        interval.hits += scheduler_stats.prefix_cache_stats.hits
        if interval.steps >= (self._line_steps or GAUGE_STEPS):
            self._finish(scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Nothing: the worker says that our model serves."""

    def _finish(self, stats: "SchedulerStats") -> None:
        """Set the gauges of the interval, write its line, begin the next."""
        interval, now_s = self._interval, time.monotonic()
        self._interval = _Interval(begin_s=now_s)
        elapsed_s = max(now_s - interval.begin_s, 1e-9)
        values = {
            metrics.STEP_RATE: interval.steps / elapsed_s,
            metrics.PROMPT_RATE: interval.prompt_tokens / elapsed_s,
            metrics.GENERATION_RATE: interval.generation_tokens / elapsed_s,
        }
        if interval.queries:
            values[metrics.PREFIX_HITS] = interval.hits / interval.queries
        if interval.first_tokens_s:
            values[metrics.FIRST_TOKEN] = sum(interval.first_tokens_s) / len(interval.first_tokens_s)
        for metric, value in values.items():
            self._of(metric).set(value)
        if self._line_steps:
            balance = metrics.published(envs.metrics_folder(), metrics.MOE_LB)  # computed and served by a worker
            if balance is not None:
                values[metrics.MOE_LB] = balance
            parts = [f"{metric.name.removeprefix(metrics.PREFIX)} {value:.4g}" for metric, value in values.items()]
            logger.info(
                "DeepInfer engine %s: %d steps, running %d, waiting %d, preempted %d, kv_use_ratio %.3f, %s",
                self._engine,
                interval.steps,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                interval.preemptions,
                stats.kv_cache_usage,
                ", ".join(parts),
            )

    def _of(self, metric: metrics.Metric) -> Any:
        return _series()[metric.name].labels(engine=self._engine)
