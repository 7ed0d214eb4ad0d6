"""The variables: defaults, both sides of every rule, and names that have no effect."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepinfer_plugin import envs, variables
from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.settings import Arithmetic, Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    values = envs.load({})
    assert values.texts == {}
    assert (values[variables.ACCELERATOR], values[variables.BATCH_INVARIANT]) == ("auto", True)
    assert (values[variables.ARITHMETIC], values[variables.DISABLE]) == ("ref", False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("off", True), ("2", True), ("0", False), ("false", False), ("False", False)],
)
def test_booleans_are_read_as_deepinfer_reads_them(text: str, value: bool) -> None:
    assert envs.load({"DEEPINFER_BATCH_INVARIANT": text})[variables.BATCH_INVARIANT] is value


def test_an_empty_boolean_is_off() -> None:
    assert envs.load({"DEEPINFER_BATCH_INVARIANT": ""})[variables.BATCH_INVARIANT] is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEPINFER_ACCELERATOR", "gpu"),
        ("DEEPINFER_ACCELERATOR", ""),
        ("DEEPINFER_ACCELERATOR", "CPU"),
        ("DEEPINFER_ARITHMETIC", "fp32"),
    ],
)
def test_a_bad_value_names_variable_value_and_rule(name: str, text: str) -> None:
    rule = next(v.kind.rule for v in variables.VARIABLES if v.name == name)
    with pytest.raises(SettingError) as caught:
        envs.load({name: text})
    message = str(caught.value)
    assert name in message
    assert repr(text) in message
    assert rule in message


@pytest.mark.parametrize("word", ["auto", "nvidia", "ascend", "cpu"])
def test_every_accelerator_word_has_its_member(word: str) -> None:
    assert Settings.from_envs({"DEEPINFER_ACCELERATOR": word}).accelerator.value == word


@pytest.mark.parametrize("word", ["ref", "q32", "s32"])
def test_every_arithmetic_word_has_its_member(word: str) -> None:
    assert Settings.from_envs({"DEEPINFER_ARITHMETIC": word}).arithmetic.value == word


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    [text] = envs.warnings({"DEEPINFER_BATCHINVARIANT": "1", "PATH": "/bin"})
    assert "DEEPINFER_BATCHINVARIANT" in text
    assert text.endswith("the nearest is DEEPINFER_BATCH_INVARIANT")


def test_a_boolean_that_looks_false_but_is_true_is_warned_about() -> None:
    [text] = envs.warnings({"DEEPINFER_DISABLE": "off", "DEEPINFER_BATCH_INVARIANT": "yes"})
    assert text == "environment: DEEPINFER_DISABLE is 'off', which counts as on; write 0 to turn it off"


def test_known_names_give_no_warning() -> None:
    assert envs.warnings({v.name: v.default for v in variables.VARIABLES}) == []


def test_sources_say_where_a_value_came_from() -> None:
    found = envs.sources({"DEEPINFER_DISABLE": "0"})
    assert found["DEEPINFER_DISABLE"] == "environment"
    assert found["DEEPINFER_ACCELERATOR"] == "default"


def test_settings_follow_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "s32")
    settings = Settings.from_envs()
    assert settings.arithmetic is Arithmetic.S32
    assert settings.to_json()["arithmetic"] == "s32"


def test_variables_that_did_not_change_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "q32")
    first = envs.load()
    monkeypatch.setenv("ANOTHER_PROGRAM", "1")
    assert envs.load() is first
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "s32")
    assert envs.load() is not first


def test_arithmetic_modes_differ_where_the_golden_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from deepinfer_kernels.kv_store import RecordFormat

    assert Arithmetic.REF.activation_dtype is torch.bfloat16
    assert Arithmetic.Q32.activation_dtype is Arithmetic.S32.activation_dtype is torch.float32
    assert [mode.quantize for mode in Arithmetic] == [True, True, False]
    assert [mode.is_exact_bf16 for mode in Arithmetic] == [True, False, False]
    formats = [Arithmetic.REF.window_format, Arithmetic.Q32.compressed_format, Arithmetic.REF.index_format]
    assert formats == [RecordFormat.MXFP8, RecordFormat.NVFP4, RecordFormat.MXFP4]
    assert {Arithmetic.S32.window_format, Arithmetic.S32.compressed_format, Arithmetic.S32.index_format} == {
        RecordFormat.FP32
    }


def test_a_child_gets_what_is_set_and_not_what_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TEST_A", "a")
    monkeypatch.setenv("DEEPINFER_TEST_B", "b")
    child = envs.child_environment({"DEEPINFER_TEST_A": None, "DEEPINFER_TEST_C": "c"})
    assert "DEEPINFER_TEST_A" not in child
    assert (child["DEEPINFER_TEST_B"], child["DEEPINFER_TEST_C"]) == ("b", "c")


def test_the_first_model_runner_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(PlatformError, match="VLLM_USE_V2_MODEL_RUNNER is '0', expected 1"):
        envs.prepare_interpreter_environment()


def test_kernels_already_bound_to_compiled_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", ModuleType("vllm.triton_utils"))
    with pytest.raises(PlatformError, match="TRITON_INTERPRET=1"):
        envs.prepare_interpreter_environment()


def test_the_interpreter_environment_keeps_a_thread_count_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    envs.prepare_interpreter_environment()
    child = envs.child_environment()
    names = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS")
    assert [child[name] for name in names] == ["", "1", "1", "3"]


def test_a_variable_is_set_only_to_a_value_inside_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ARITHMETIC", "ref")
    envs.set_variable("DEEPINFER_ARITHMETIC", "s32")
    assert Settings.from_envs().arithmetic is Arithmetic.S32
    with pytest.raises(SettingError, match="DEEPINFER_ARITHMETIC is 's33'"):
        envs.set_variable("DEEPINFER_ARITHMETIC", "s33")
    assert Settings.from_envs().arithmetic is Arithmetic.S32


def test_the_folder_of_compiled_kernels_is_made_and_handed_to_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    envs.use_kernel_cache(None)
    assert "TRITON_CACHE_DIR" not in envs.child_environment()
    folder = tmp_path / "a" / "b"
    for _ in range(2):  # a child process inherits both variables and does it again
        envs.use_kernel_cache(folder)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
    from triton import knobs

    assert knobs.cache.dir == str(folder)
    monkeypatch.delenv("TRITON_CACHE_DIR")


def test_a_folder_that_cannot_hold_kernels_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"DEEPINFER_JIT_CACHE_DIR is '.*file', no folder that can be written"):
        envs.use_kernel_cache(tmp_path / "file")
    assert "TRITON_CACHE_DIR" not in envs.child_environment()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with pytest.raises(SettingError, match="TRITON_CACHE_DIR is '/elsewhere', expected one folder"):
        envs.use_kernel_cache(tmp_path)
