"""The limits on structured output that a user can set."""

from __future__ import annotations

import pytest

from deepinfer_plugin import envs, variables
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.settings import Settings

CACHE, TIMEOUT = variables.XGRAMMAR_CACHE_LIMIT_BYTES, variables.XGRAMMAR_TIMEOUT


@pytest.mark.parametrize(
    ("limit", "expected"), [("0", "0"), ("1073741824", "512"), (str(10 << 30), "5120"), ("-1", str(1 << 20))]
)
def test_the_cache_limit_is_shared_by_vllms_two_caches(
    limit: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(envs.XGRAMMAR_CACHE_SWITCH, raising=False)
    monkeypatch.setenv(envs.XGRAMMAR_CACHE_SWITCH, expected)  # the same value beside it is no contradiction
    envs.limit_grammar_cache(Settings.from_envs({CACHE.name: limit})[CACHE])
    assert envs.child_environment()[envs.XGRAMMAR_CACHE_SWITCH] == expected


def test_a_contradiction_with_vllms_variable_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.XGRAMMAR_CACHE_SWITCH, "7")
    with pytest.raises(SettingError, match="VLLM_XGRAMMAR_CACHE_MB is '7', expected '512' with DEEPINFER_XGRAMMAR"):
        envs.limit_grammar_cache(1 << 30)


@pytest.mark.parametrize(
    ("name", "text"), [(CACHE.name, "-2"), (CACHE.name, str((10 << 30) + 1)), (TIMEOUT.name, "0"), (TIMEOUT.name, "x")]
)
def test_a_value_outside_its_bounds_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=name):
        Settings.from_envs({name: text})


def test_the_time_limit_is_twenty_seconds_unless_it_is_set() -> None:
    assert Settings.from_envs({})[TIMEOUT] == 20
    assert Settings.from_envs({TIMEOUT.name: "1"})[TIMEOUT] == 1
