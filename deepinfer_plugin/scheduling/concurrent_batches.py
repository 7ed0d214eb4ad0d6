"""How many steps the scheduler plans before it has the result of the first: ``max_concurrent_batches``.

vLLM plans one step ahead of the one that runs: two at once. Between the end of a step and the start of the step after
the next, the host takes the result, plans, sends the plan to the workers and launches; where that takes longer than the
step that runs meanwhile, the device waits. With three at once it has two steps of time.

A request with a grammar is planned in every second step then (in every third with four at once): its mask needs the
token of its last step, and vLLM waits for the oldest step only. Drafts are refused: those of such a request would be
taken from a step it has no part in. vLLM keeps blocks of windows for as many full steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.platforms.served import serves_our_model
from deepinfer_plugin.wrapping import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "max_concurrent_batches"  # in --additional-config; vLLM's name for the number
DEFAULT, MOST = 2, 4
_DISTANCE = "_deepinfer_grammar_distance"


def install() -> None:
    """Wrap vLLM's number and what its scheduler does behind a plan, once a process.

    Raises:
        PlatformError: they are not those this version knows.
    """
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    wrap(VllmConfig, "max_concurrent_batches", ("self",), _max_concurrent_batches)
    wrap(AsyncScheduler, "_update_after_schedule", ("self", "scheduler_output"), _update_after_schedule)


def asked_for(vllm_config: VllmConfig) -> int:
    """The number of ``--additional-config``, DEFAULT without one.

    Raises:
        ConfigError: it is no number from DEFAULT to MOST, or larger than DEFAULT beside an option that forbids that.
    """
    options = vllm_config.additional_config
    value = options.get(OPTION, DEFAULT) if isinstance(options, dict) else DEFAULT
    if isinstance(value, bool) or not isinstance(value, int) or not DEFAULT <= value <= MOST:
        raise ConfigError(f"additional_config: {OPTION} is {value!r}, expected a number from {DEFAULT} to {MOST}")
    if value == DEFAULT:
        return value
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"additional_config: {OPTION} is {value} with stages of a pipeline, which plan one step ahead of their "
            f"number, expected {DEFAULT}; leave the option out"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            f"additional_config: {OPTION} is {value} beside speculative_config, expected {DEFAULT}: a grammar would be "
            "given the drafts of another step; leave one of the two out"
        )
    if not vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            f"additional_config: {OPTION} is {value}, but scheduling is not asynchronous here, expected {DEFAULT}; "
            "leave it out, or --no-async-scheduling (on the CPU set async_scheduling_on_cpu beside --async-scheduling)"
        )
    return value


def _max_concurrent_batches(original: Callable[[Any], int], config: Any) -> int:
    """vLLM's own number where it plans no step ahead, for another model, or with stages of a pipeline."""
    found = original(config)
    return asked_for(config) if found == DEFAULT and serves_our_model(config) else found


def _update_after_schedule(original: Callable[..., None], scheduler: Any, scheduler_output: Any) -> None:
    original(scheduler, scheduler_output)
    distance = scheduler.__dict__.get(_DISTANCE)
    if distance is None:
        distance = scheduler.__dict__[_DISTANCE] = scheduler.vllm_config.max_concurrent_batches - 1
    if distance == 1:
        return
    for name in scheduler_output.num_scheduled_tokens:
        request = scheduler.requests[name]
        if request.use_structured_output and not request.is_prefill_chunk:
            request.next_decode_eligible_step = scheduler.current_step + distance
