"""How many steps may be under way: what may be asked for, and who gets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.scheduling import concurrent_batches
from deepinfer_plugin.scheduling.concurrent_batches import OPTION, asked_for
from deepinfer_plugin.wrapping import IS_OURS, wrap


def config(
    options: object, *, is_async: bool = True, drafts: object = None, model: str = "deepseek_v41", stages: int = 1
) -> Any:
    return SimpleNamespace(
        additional_config=options,
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        speculative_config=drafts,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model)),
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_to_four_may_be_asked_for(count: int) -> None:
    assert asked_for(config({OPTION: count, "other": 1})) == count


@pytest.mark.parametrize("options", [{}, {"other": 4}, object()])
def test_vllms_number_stays_where_nobody_asks(options: object) -> None:
    assert asked_for(config(options)) == 2


@pytest.mark.parametrize("value", [1, 5, 0, -3, True, "3", 3.0, None])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=rf"additional_config: {OPTION} is .*, expected a number from 2 to 4"):
        asked_for(config({OPTION: value}))


def test_what_forbids_it_is_named() -> None:
    with pytest.raises(ConfigError, match="is 3, but scheduling is not asynchronous here"):
        asked_for(config({OPTION: 3}, is_async=False))
    with pytest.raises(ConfigError, match="is 3 beside speculative_config"):
        asked_for(config({OPTION: 3}, drafts=object()))
    with pytest.raises(ConfigError, match="is 3 with stages of a pipeline"):
        asked_for(config({OPTION: 3}, stages=2, is_async=False))  # the reason that no other flag removes
    assert asked_for(config({OPTION: 2}, is_async=False, drafts=object())) == 2


class Stages:
    """Stands for vLLM's configuration, whose number of stages a test sets."""

    found = 2

    def __init__(self, shown: Any) -> None:
        self.__dict__.update(vars(shown))

    @property
    def max_concurrent_batches(self) -> int:
        return self.found


wrap(Stages, "max_concurrent_batches", ("self",), concurrent_batches._max_concurrent_batches)


BY_STAGES = [(2, "deepseek_v41", 4), (2, "llama", 2), (1, "deepseek_v41", 1), (3, "deepseek_v41", 3)]


@pytest.mark.parametrize(("found", "model", "count"), BY_STAGES)
def test_only_our_model_with_one_step_ahead_gets_more(
    found: int, model: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stages, "found", found)
    assert Stages(config({OPTION: 4}, model=model)).max_concurrent_batches == count


def test_the_installed_vllm_is_wrapped_once() -> None:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    concurrent_batches.install()
    kept = VllmConfig.__dict__["max_concurrent_batches"], AsyncScheduler._update_after_schedule
    concurrent_batches.install()
    assert (VllmConfig.__dict__["max_concurrent_batches"], AsyncScheduler._update_after_schedule) == kept
    assert getattr(kept[0].fget, IS_OURS)
    assert getattr(kept[1], IS_OURS)
