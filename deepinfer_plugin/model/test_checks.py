"""Options that break the promise are refused before an engine starts, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.errors import ConfigError, SettingError

pytestmark = pytest.mark.usefixtures("vllm_variables")

PARALLEL: dict[str, Any] = {
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_elastic_ep": False,
    "enable_dbo": False,
}


def check(parallel: dict[str, Any] | None = None, **others: Any) -> None:
    from deepinfer_plugin.model.checks import check_engine_options

    config: dict[str, Any] = {
        "parallel_config": SimpleNamespace(**{**PARALLEL, **(parallel or {})}),
        "cache_config": SimpleNamespace(user_specified_block_size=False, block_size=None),
        "speculative_config": None,
        "lora_config": None,
        **others,
    }
    check_engine_options(SimpleNamespace(**config))


def test_the_default_options_are_served() -> None:
    check()


@pytest.mark.parametrize("name", [name for name in PARALLEL if name.endswith("_size")])
def test_context_parallelism_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2, expected 1"):
        check({name: 2})


@pytest.mark.parametrize("name", ["enable_elastic_ep", "enable_dbo"])
def test_ranks_that_come_and_go_and_micro_batches_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is True, expected False"):
        check({name: True})


def test_a_drafter_that_is_not_tested_with_the_model_is_refused() -> None:
    check(speculative_config=SimpleNamespace(method="ngram", enable_adaptive_verification=False))
    with pytest.raises(ConfigError, match=r"speculative_config.method is 'eagle', expected dspark or ngram"):
        check(speculative_config=SimpleNamespace(method="eagle"))


def test_a_sampler_of_somebody_else_is_refused() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from deepinfer_plugin.sampling.sampler import DeepInferSampler

    class WatermarkSampler(Sampler):
        """What vLLM builds with watermarks on."""

    with pytest.raises(ConfigError, match="the model runner built WatermarkSampler, expected Sampler"):
        DeepInferSampler.adopt(WatermarkSampler.__new__(WatermarkSampler))


def test_vllms_own_choice_of_verified_drafts_is_refused() -> None:
    drafts = SimpleNamespace(method="dspark", enable_adaptive_verification=True)
    with pytest.raises(ConfigError, match=r"enable_adaptive_verification is True, expected False: .* SM90 .*VARLEN=1"):
        check(speculative_config=drafts)


def test_our_choice_needs_drafts_with_a_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    check(speculative_config=SimpleNamespace(method="dspark", enable_adaptive_verification=False))
    with pytest.raises(
        SettingError, match=r"DEEPINFER_ENABLE_MTP_VARLEN is '1' with drafts of 'ngram', expected dspark"
    ):
        check(speculative_config=SimpleNamespace(method="ngram", enable_adaptive_verification=False))
