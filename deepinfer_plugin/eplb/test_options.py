"""Which flags and variables balance experts, what is refused, and that vLLM's CPU check does not see the flags."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.eplb.options import EplbOptions, keep_where_vllm_has_no_balancer
from deepinfer_plugin.errors import ConfigError

GIVEN: dict[str, Any] = {
    "window_size": 3,
    "step_interval": 5,
    "num_redundant_experts": 1,
    "communicator": None,
    "use_async": True,
}


class Config(SimpleNamespace):
    """vLLM's EPLBConfig, as much of it as is read."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(**{**GIVEN, "num_redundant_experts": 0, **changed})


def engine(*, is_on: bool, kept: dict[str, Any] | None = None) -> Any:
    parallel = SimpleNamespace(enable_eplb=is_on, eplb_config=Config(**GIVEN))
    return SimpleNamespace(parallel_config=parallel, additional_config=kept or {})


def options(**changed: Any) -> EplbOptions:
    found = EplbOptions.of_engine(engine(is_on=True))
    assert found is not None
    return replace(found, **changed)


def test_an_engine_balances_if_the_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EplbOptions.of_engine(engine(is_on=False)) is None
    monkeypatch.setenv("DEEPINFER_EPLB_POLICY", "vllm")
    found = options()
    assert (found.policy, found.window_size, found.step_interval, found.num_extra_experts) == ("vllm", 3, 5, 1)
    assert (found.counts_prefill, found.is_async) == (False, True)
    assert [found.extra_experts(8, ranks) for ranks in (1, 2, 4)] == [1, 2, 4]


def test_the_flags_reach_our_balancer_where_vllm_would_refuse_them() -> None:
    args = SimpleNamespace(enable_eplb=True, eplb_config=Config(**GIVEN), additional_config={"other": 1})
    keep_where_vllm_has_no_balancer(args)
    assert (args.enable_eplb, args.eplb_config.num_redundant_experts) == (False, 0)
    assert args.additional_config["other"] == 1
    keep_where_vllm_has_no_balancer(args)  # a second time changes nothing
    assert EplbOptions.of_engine(engine(is_on=False, kept=args.additional_config)) == options()


@pytest.mark.parametrize(
    ("changed", "num_ranks", "has_expert_parallel", "message"),
    [
        ({}, 1, True, "enable_eplb is True with 1 ranks"),
        ({}, 2, False, "enable_expert_parallel False, expected two ranks or more that share experts"),
        ({"window_size": 6}, 2, True, "window_size is 6, expected at most step_interval, 5"),
        ({"num_extra_experts": 9}, 2, True, "num_redundant_experts is 9, expected at most 8"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    changed: dict[str, Any], num_ranks: int, has_expert_parallel: bool, message: str
) -> None:
    options().check(8, 2, has_expert_parallel=True)
    options(window_size=5, num_extra_experts=8).check(8, 2, has_expert_parallel=True)
    with pytest.raises(ConfigError, match=message):
        options(**changed).check(8, num_ranks, has_expert_parallel=has_expert_parallel)
