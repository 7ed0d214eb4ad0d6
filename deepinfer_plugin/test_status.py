"""The status: complete, honest about what is off, and the same in text and JSON."""

from __future__ import annotations

import json

import pytest

from deepinfer_plugin import compat
from deepinfer_plugin.__main__ import main
from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.status import Status, features
from deepinfer_plugin.translate import Flags, translate
from deepinfer_plugin.variables import VARIABLES


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_every_feature_has_one_row_in_order() -> None:
    keys = [row.key for row in features(Settings(), is_active=True)]
    assert keys[:28] == [f"F{n}" for n in range(1, 29)]
    assert len(set(keys)) == len(keys)


def test_what_is_not_built_is_off_with_a_reason() -> None:
    rows = {row.key: row for row in features(Settings(), is_active=True)}
    assert {rows[key].state for key in ("F14", "F24")} == {"not built"}
    assert all(row.why and row.origin for row in rows.values())


def test_a_handed_back_architecture_turns_our_rows_off() -> None:
    rows = {row.key: row for row in features(Settings.from_envs({"DEEPINFER_BATCH_INVARIANT": "0"}), is_active=True)}
    assert [rows[key].state for key in ("F9", "F16", "F11")] == ["off", "off", "on"]
    assert rows["F9"].origin == "environment"


def test_a_disabled_plugin_has_no_row_on_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_DISABLE", "1")
    status = Status.from_process()
    assert {row.origin for row in status.features if row.state == "on"} == {"vLLM"}


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    for row in status["features"]:
        assert f"{row['key']:<4} {row['state']:<9} {row['name']}" in text
    assert status["provenance"]["versions"]["vllm"] in text
    assert status["provenance"]["machine"]["kernel_set"] == "reference"
    assert set(status["provenance"]["settings"]) < set(status["settings"])
    assert "logging_interval_step" in status["settings"]
    assert "logging_interval_step" in text
    assert len(status["provenance"]["patches"]) == len(compat.PATCHES)


def test_a_refused_machine_is_a_problem_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "ascend")
    assert main(["status"]) == 1
    assert "problem: platform: DEEPINFER_ACCELERATOR is 'ascend'" in capsys.readouterr().out


def test_a_bad_variable_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "half")
    assert main(["status"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: environment: DEEPINFER_ARITHMETIC is 'half', expected ref, q32 or s32")
    assert captured.err.count("\n") == 1


def test_an_unknown_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEEPINFER_ACELERATOR", "cpu")
    assert main(["status"]) == 0
    assert "warning: environment: DEEPINFER_ACELERATOR" in capsys.readouterr().out


def test_a_feature_that_is_not_built_but_asked_for_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K", "5")
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1")
    assert main(["status"]) == 1
    text = capsys.readouterr().out
    assert "problem: environment: DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K is '5', which asks for F25" in text
    assert "[environment, DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K=5]" in text
    assert "[environment, DEEPINFER_ZERO_OVERHEAD_SCHEDULING=1]" in text


def test_the_rows_of_the_server_wide_extras_say_who_asked() -> None:
    environ = {
        "DEEPINFER_SAMPLER_FORCE_TOPK": "8",
        "DEEPINFER_DECODE_TOKEN_BLACKLIST": "3-5",
        "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": "1",
    }
    for given in ({}, environ):
        rows = {row.key: row for row in features(Settings.from_envs(given), is_active=True)}
        for key, name in zip(("F17", "F18", "F19"), environ, strict=True):
            expected = ("on", "environment", {name: environ[name]}) if given else ("on", "request", {})
            assert (rows[key].state, rows[key].origin, rows[key].values) == expected
            assert name in rows[key].why


def test_a_row_says_whether_a_variable_or_a_flag_decided() -> None:
    flags = Flags(async_scheduling=False, speculative_config={"method": "dspark"})
    for environ in ({}, {"DEEPINFER_BATCH_INVARIANT": "0"}):
        settings = Settings.from_envs(environ)
        found = features(settings, is_active=True, translated=translate(settings, flags))
        rows = {row.key: row for row in found}
        assert (rows["F8"].state, rows["F8"].origin) == ("off", "flag")
        assert (rows["F1"].state, rows["F1"].origin) == ("on", "flag")
        assert "--speculative-config {'method': 'dspark'}" in rows["F1"].why
    settings = Settings.from_envs({"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0"})
    rows = {r.key: r for r in features(settings, is_active=True, translated=translate(settings, Flags()))}
    assert (rows["F8"].state, rows["F8"].origin) == ("off", "environment")
    assert (rows["F9"].state, rows["F9"].origin) == ("on", "default")


def test_flags_of_a_server_are_seen_beside_the_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0")
    assert main(["status", "--", "--async-scheduling"]) == 1
    text = capsys.readouterr().out
    assert "problem: settings: DEEPINFER_ZERO_OVERHEAD_SCHEDULING is '0', but the flag is --async-scheduling" in text


@pytest.mark.parametrize("version", ["0.33.0", "0.33.2", "0.33.1rc1", "0.33.0+cpu"])
def test_supported_versions_pass(version: str) -> None:
    compat.check_vllm_version(version)


@pytest.mark.parametrize("version", [None, "0.32.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_other_versions_are_refused_by_name(version: str | None) -> None:
    with pytest.raises(PlatformError) as caught:
        compat.check_vllm_version(version)
    assert (version or "not installed") in str(caught.value)
    assert compat.SUPPORTED_VLLM in str(caught.value)
