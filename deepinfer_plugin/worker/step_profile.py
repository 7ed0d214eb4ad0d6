"""The start-up profile of a worker: times of forward passes by rows, from the cache or measured, equal on all ranks."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from deepinfer_plugin import provenance, variables
from deepinfer_plugin.cache.specs import num_drafts
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative.curve_cache import CurveCache
from deepinfer_plugin.speculative.step_time import StepTimeCurve, profile_sizes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger(f"vllm.{__name__}")

_REPEATS = 3  # of every size, behind one that is not timed
_CONTEXT = 8192  # tokens of a measured request, or the longest context


def step_time_curve(vllm_config: VllmConfig, runner: "GPUModelRunner", settings: Settings) -> StepTimeCurve:
    """The curve of this engine; every rank gets that of the first, and all measure or none.

    Args:
        vllm_config: of the worker.
        runner: whose graphs are captured.
        settings: name the folder of stored curves, or none.
    """
    manager = runner.cudagraph_manager
    graphs = manager.captured_token_counts() if manager is not None else []
    cache = _cache(vllm_config, settings, graphs)
    is_first = get_tp_group().rank_in_group == 0 and get_dp_group().rank_in_group == 0
    stored = cache.load(time.time()) if cache is not None and is_first else None
    curve = _of_first_rank(stored)
    if curve is not None:
        logger.info("Step times: %d sizes read from %s", len(curve.rows), "the cache" if cache is None else cache.path)
        return curve
    start_s = time.monotonic()
    curve = _of_first_rank(measure(runner, graphs, _most_rows(vllm_config)))
    assert curve is not None
    if cache is not None and is_first:
        cache.store(curve, time.time())
    logger.info(
        "Step times: %d sizes measured in %.1f s, %.1f ms at %d rows, %.1f ms at %d",
        len(curve.rows),
        time.monotonic() - start_s,
        1e3 * curve.times_s[0],
        curve.rows[0],
        1e3 * curve.times_s[-1],
        curve.rows[-1],
    )
    return curve


def measure(runner: "GPUModelRunner", graphs: list[int], max_rows: int) -> StepTimeCurve:
    """Run forward passes of every size and take the median of their times.

    Args:
        runner: of the worker.
        graphs: rows of captured graphs, ascending.
        max_rows: most rows of a step that is measured.
    """
    sizes = profile_sizes(graphs, max_rows)
    runner.kv_connector.set_disabled(True)
    try:
        times_s = tuple(_median_s(partial(_forward, runner, rows)) for rows in sizes)
    finally:
        runner.kv_connector.set_disabled(False)
    return StepTimeCurve(rows=sizes, times_s=times_s, largest_graph=max(graphs, default=0))


def cache_key(vllm_config: VllmConfig, graphs: list[int], device: Capabilities) -> dict[str, Any]:
    """What step times depend on, as JSON values."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    return {
        "model": asdict(ModelConfig.from_hf(vllm_config.model_config.hf_config)),
        "arithmetic": Settings.from_envs().arithmetic.value,
        "drafts": num_drafts(vllm_config),
        "graphs": graphs,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_rows": _most_rows(vllm_config),
        "max_model_len": vllm_config.model_config.max_model_len,
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "data": parallel.data_parallel_size,
            "experts": parallel.enable_expert_parallel,
        },
        "versions": provenance.versions(),
        "device": [device.accelerator, device.device_name, device.compute_capability, device.kernel_set],
    }


def _cache(vllm_config: VllmConfig, settings: Settings, graphs: list[int]) -> CurveCache | None:
    folder = settings[variables.DECODE_PERF_CACHE_DIR]
    decision = current_decision()
    if folder is None or decision is None:
        return None
    return CurveCache(
        folder=folder,
        key=cache_key(vllm_config, graphs, Capabilities.from_decision(decision)),
        lifetime_s=settings[variables.DECODE_PERF_CACHE_TTL_SEC],
        warn=logger.warning,
    )


def _most_rows(vllm_config: VllmConfig) -> int:
    """Rows of a step in which every request verifies all its drafts; longer steps have prompts, too."""
    scheduler = vllm_config.scheduler_config
    most: int = min(scheduler.max_num_seqs * (1 + num_drafts(vllm_config)), scheduler.max_num_batched_tokens)
    return most


def _of_first_rank(curve: StepTimeCurve | None) -> StepTimeCurve | None:
    found: StepTimeCurve | None = get_dp_group().broadcast_object(get_tp_group().broadcast_object(curve))
    return found


def _median_s(run: Callable[[], None]) -> float:
    run()
    times_s = []
    for _ in range(_REPEATS):
        torch.accelerator.synchronize()
        start_s = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s)


def _forward(runner: "GPUModelRunner", rows: int) -> None:
    """A forward pass as a step launches it: requests with a long context, as many as there can be. Draws nothing."""
    num_reqs = min(rows, runner.max_num_reqs)
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {
        f"_profile_{index}": rows // num_reqs + (index < rows % num_reqs) for index in range(num_reqs)
    }
    output.total_num_scheduled_tokens = rows
    runner.execute_model(output, dummy_run=True, context_len=_CONTEXT)
    runner.execute_model_state = None
