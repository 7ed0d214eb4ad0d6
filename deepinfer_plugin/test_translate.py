"""Every row F1-F28 on both sides of its bounds; variables against flags: what disagrees is refused by both names."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.eplb.options import keep_where_vllm_has_no_balancer
from deepinfer_plugin.errors import ConfigError, SettingError
from deepinfer_plugin.features import ROWS
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.translate import Flags, translate
from deepinfer_plugin.variables import FAMILIES, VARIABLES

VLLMS = {"DEEPINFER_BATCH_INVARIANT": "0"}  # vLLM's own model serves
DSPARK = {"method": "dspark", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Variables and flags; ``refused`` holds pieces of the one sentence, empty where the start goes on."""

    row: str
    variables: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    result: dict[str, Any] = field(default_factory=dict)  # arguments afterwards


def both(row: str, name: str, inside: str, outside: str, **vllm: str) -> list[Case]:
    """A value that starts and one that does not, for a variable that our model does not act on."""
    return [
        Case(row=row, variables={name: inside, **vllm}),
        Case(row=row, variables={name: outside, **vllm}, refused=(name, repr(outside))),
    ]


N, VARLEN, TEMPERATURE = (
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
)
EXTRA = "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS"
ZERO, FORCE = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE"
OFFLOAD, KEEP = SimpleNamespace(cpu_offload=True), SimpleNamespace(cpu_offload=False)

CASES: list[Case] = [
    # F1: vLLM's own model has drawn drafts instead of greedy ones; ours draws them in any case
    *both("F1", N, "0", "6"),
    *both("F1", N, "0", "-1", **VLLMS),
    Case(
        row="F1", variables={N: "3"}, result={"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}}
    ),
    Case(
        row="F1",
        variables={N: "3"},
        flags={"speculative_config": {"method": "ngram"}},
        refused=(f"{N} is '3'", "ngram"),
    ),
    Case(row="F1", variables={N: "5", **VLLMS}, result={"speculative_config": DSPARK}),
    Case(row="F1", variables={N: "1", **VLLMS}, result={"speculative_config": {**DSPARK, "num_speculative_tokens": 1}}),
    Case(
        row="F1",
        variables={N: "5", **VLLMS},
        flags={"speculative_config": {"method": "dspark", "model": "x"}},
        result={"speculative_config": {**DSPARK, "model": "x"}},
    ),
    *(
        Case(
            row="F1",
            variables={N: number, **VLLMS},
            flags={"speculative_config": config},
            refused=(f"{N} is '{number}'", "--speculative-config", str(config)),
        )
        for number, config in (
            ("5", {"method": "dspark", "num_speculative_tokens": 4}),
            ("5", {"method": "ngram"}),
            ("5", {"method": "dspark", "draft_sample_method": "greedy"}),
            ("0", {"method": "dspark"}),
        )
    ),
    # F2: needs drafts; our model's workers choose themselves
    *both("F2", VARLEN, "0", "1"),
    Case(
        row="F2",
        variables={VARLEN: "1", N: "5"},
        result={"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}},
    ),
    Case(row="F2", variables={VARLEN: "1", **VLLMS}, refused=(VARLEN, N, "--speculative-config")),
    Case(
        row="F2",
        variables={VARLEN: "1", N: "5", **VLLMS},
        result={"speculative_config": {**DSPARK, "enable_adaptive_verification": True}},
    ),
    *(
        Case(
            row="F2",
            variables={VARLEN: text, **VLLMS},
            flags={"speculative_config": {"method": "dspark", "enable_adaptive_verification": flag}},
            refused=() if (text == "1") is flag else (f"{VARLEN} is '{text}'", "--speculative-config"),
        )
        for text in ("0", "1")
        for flag in (True, False)
    ),
    # F3: one number or one per draft, told before anything is said about the feature
    Case(row="F3", variables={TEMPERATURE: "0.9,1,2", N: "3"}),
    Case(row="F3", variables={TEMPERATURE: "0.9,1,2"}, flags={"speculative_config": {"method": "dspark"}}),
    Case(row="F3", variables={TEMPERATURE: "0.9,1", N: "3"}, refused=(TEMPERATURE, "2 numbers", "1 or 3", N)),
    *both("F3", TEMPERATURE, "1", "0"),
    *(
        Case(row="F3", variables={TEMPERATURE: text, N: "3", **VLLMS}, refused=refused)
        for text, refused in (
            ("1.0", ()),
            ("1,1", (TEMPERATURE, "2 numbers", "1 or 3", N)),
            ("1,1,1,1", (TEMPERATURE, "4 numbers", "1 or 3", N)),
            ("1,1,1", (TEMPERATURE, "asks for F3", "not built")),
        )
    ),
    Case(row="F4", variables={"DEEPINFER_DECODE_PERF_CACHE_DIR": "/tmp/curves"}),
    *both("F4", "DEEPINFER_DECODE_PERF_CACHE_DIR", "", "/tmp/curves", **VLLMS),
    *both("F4", "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", "3600", "0"),
    *both("F5", "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off", "maybe"),
    *both("F6", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "1", "0"),
    *both("F6", "DEEPINFER_MAX_BACKTRACKING_TOKENS", "0", "-1"),
    *both("F7", "DEEPINFER_ENCODER_REPLAY", "segment:1", "segment:0"),
    # F8
    Case(row="F8", variables={ZERO: "0"}, result={"async_scheduling": False}),
    Case(row="F8", variables={ZERO: "1"}, result={"async_scheduling": None}),
    Case(row="F8", flags={"async_scheduling": True}, result={"async_scheduling": True}),
    *(
        Case(
            row="F8",
            variables={ZERO: text},
            flags={"async_scheduling": flag},
            refused=()
            if (text == "1") is flag
            else (f"{ZERO} is '{text}'", "--async-scheduling" if flag else "--no-async-scheduling"),
        )
        for text in ("0", "1")
        for flag in (True, False)
    ),
    *both("F11", "DEEPINFER_XGRAMMAR_TIMEOUT", "1", "0"),
    *both("F11", "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES", "-1", "-2"),
    *both("F11", "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES", "10737418240", "10737418241"),
    *(
        case
        for family, row in (("EXPERT_X", "F13"), ("PROFILE_HTTP_PORT", "F23"))
        for case in both(row, f"DEEPINFER_{family}", "0", "1")
    ),
    *both("F13", "DEEPINFER_EPLB_POLICY", "vllm", "default"),
    Case(row="F13", variables={EXTRA: "0"}, result={"eplb_config": None}),
    Case(row="F13", variables={EXTRA: "2"}, refused=(f"{EXTRA} is '2'", "--enable-eplb")),
    Case(
        row="F13",
        variables={EXTRA: "2", **VLLMS},
        flags={"enable_eplb": True},
        refused=(f"{EXTRA} is '2'", "BATCH_INVARIANT=0"),
    ),
    *(
        Case(
            row="F13",
            variables={EXTRA: "2"},
            flags={"enable_eplb": True, "eplb_config": SimpleNamespace(num_redundant_experts=given)},
            refused=() if given in (0, 2) else (f"{EXTRA} is '2'", "num_redundant_experts 3"),
            result={"eplb_config": SimpleNamespace(num_redundant_experts=2)},
        )
        for given in (0, 2, 3)
    ),
    *both("F24", "DEEPINFER_PREFILL_ATTEMPT_INTERVAL", "0", "70"),
    # F15
    Case(row="F15", variables={FORCE: "1"}, result={"engram_config": None}),
    *(
        Case(
            row="F15",
            variables={FORCE: text},
            flags={"engram_config": config},
            refused=() if (text == "1") is not config.cpu_offload else (f"{FORCE} is '{text}'", "--engram-config"),
        )
        for text in ("0", "1")
        for config in (OFFLOAD, KEEP)
    ),
    # F17 to F19: our model acts on them, vLLM's own refuses them; sampling/test_server_defaults: the vocabulary
    *both("F17", "DEEPINFER_SAMPLER_FORCE_TOPK", "0", "-1"),
    *both("F18", "DEEPINFER_DECODE_TOKEN_BLACKLIST", "", "5-4"),
    *(
        case
        for row, name, text in (
            ("F17", "DEEPINFER_SAMPLER_FORCE_TOPK", "1"),
            ("F18", "DEEPINFER_DECODE_TOKEN_BLACKLIST", "0"),
            ("F19", "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "1"),
        )
        for case in (
            Case(row=row, variables={name: text}),
            Case(row=row, variables={name: text, **VLLMS}, refused=(f"{name} is '{text}'", "BATCH_INVARIANT=0")),
        )
    ),
    *both("F22", "DEEPINFER_LOGGING_INTERVAL_STEP", "0", "-1"),
    *both("F25", "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K", "0", "-1"),
    *both("F28", "DEEPINFER_JIT_CACHE_DIR", "", "\0"),
]
# Rows whose bounds are an engine option's, a config field's or a request's, and where each is tested on both sides.
ELSEWHERE = {
    "F9": "test_envs, test_register: the variable; test_vllms_switch_must_agree below",
    "F10": "sampling/test_seeds, sampling/test_front_end: 2^64 - 1, 2^64, seed + n",
    "F12": "grammar/test_so_args: trigger_token_ids, bound_token_id",
    "F14": "test_ranks_of_another_kind_are_refused below; model/test_shares, model/test_stage: what does not divide it",
    "F16": "model/test_config: use_fp4_sparse_kv",
    "F20": "sampling/test_extras: golden_token_ids; scoring/test_score: --decode-from",
    "F21": "sampling/test_extras: draft_facts",
    "F26": "encoding/test_prompt: effort 1 to 100, roles, images",
    "F27": "offline/test_inputs, offline/test_resume, bench/test_curves: their own arguments",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {case.variables} {case.flags}")
def test_a_value_on_either_side_of_a_bound(case: Case) -> None:
    flags = Flags(**case.flags)
    if case.refused:
        with pytest.raises(SettingError) as caught:
            translate(Settings.from_envs(case.variables), flags)
        text = str(caught.value)
        assert [piece for piece in case.refused if piece not in text] == []
        assert "\n" not in text
        return
    settings = Settings.from_envs(case.variables)
    found = translate(settings, flags)
    for name, value in case.result.items():
        assert getattr(flags, name) == value
    after = replace(flags)
    assert (translate(settings, flags), flags) == (found, after)  # a second time changes nothing


def test_every_row_has_both_sides_here_or_says_where() -> None:
    rows = [row.key for row in ROWS if row.key.startswith("F")]
    inside = {case.row for case in CASES if not case.refused}
    outside = {case.row for case in CASES if case.refused}
    assert inside == outside
    assert inside.isdisjoint(ELSEWHERE)
    assert sorted(inside | set(ELSEWHERE)) == sorted(rows)
    features = {variable.feature for variable in VARIABLES} | {family.feature for family in FAMILIES}
    assert features - {""} <= inside | {"F9", "F27", "X3"}


def test_forced_device_storage_becomes_vllms_own_configuration() -> None:
    flags = Flags()
    [entry] = translate(Settings.from_envs({FORCE: "1", **VLLMS}), flags)
    assert flags.engram_config.cpu_offload is False
    assert (entry.feature, entry.origin, entry.is_on) == ("F15", FORCE, True)


@pytest.mark.parametrize(("varlen", "is_on"), [("1", True), ("0", False)])
def test_a_folder_of_step_times_is_used_with_scheduled_verification_only(varlen: str, is_on: bool) -> None:
    settings = Settings.from_envs({VARLEN: varlen, N: "5", "DEEPINFER_DECODE_PERF_CACHE_DIR": "curves"})
    rows = {entry.feature: entry for entry in translate(settings, Flags())}
    assert (rows["F2"].is_on, rows["F4"].is_on) == (is_on, is_on)
    assert ("curves" in rows["F4"].text) is is_on


def test_a_flag_without_a_variable_is_reported_as_the_flag() -> None:
    config = {"method": "dspark", "enable_adaptive_verification": True}
    flags = Flags(speculative_config=config, async_scheduling=False, engram_config=KEEP, enable_eplb=True)
    found = translate(Settings.from_envs(VLLMS), flags)
    assert [(entry.feature, entry.origin, entry.is_on) for entry in found] == [
        ("F1", "flag", True),
        ("F2", "flag", True),
        ("F8", "flag", False),
        ("F13", "flag", True),
        ("F15", "flag", True),
    ]


def test_replicas_are_known_after_the_flags_were_taken_out_of_vllms_sight() -> None:
    class Config(SimpleNamespace):
        def __init__(self, **changed: Any) -> None:
            given = {"window_size": 2, "step_interval": 2, "communicator": None, "use_async": False}
            super().__init__(**{**given, "num_redundant_experts": 0, **changed})

    settings = Settings.from_envs({EXTRA: "2"})
    args: Any = SimpleNamespace(**asdict(Flags(enable_eplb=True)), additional_config={})
    args.eplb_config = Config()
    found = translate(settings, args)
    keep_where_vllm_has_no_balancer(args)
    assert not args.enable_eplb
    assert translate(settings, args) == found


@pytest.mark.parametrize(("device", "other"), [("cpu", "1"), ("cuda", "0")])
def test_vllms_switch_must_agree(device: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", other)
    with pytest.raises(SettingError, match=f"VLLM_BATCH_INVARIANT is '{other}', .*DEEPINFER_BATCH_INVARIANT=1"):
        envs.pin_vllm_batch_invariance(device)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", {"cpu": "0", "cuda": "1"}[device])
    envs.pin_vllm_batch_invariance(device)


def engine_options(**changed: Any) -> Any:
    """The part of vLLM's configuration that the checks read, as a plain start on one device has it."""
    sizes = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    parallel = {f"{size}_parallel_size": 1 for size in sizes} | {"enable_elastic_ep": False, "enable_dbo": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: changed.pop(name, value) for name, value in parallel.items()}),
        cache_config=SimpleNamespace(user_specified_block_size=False, block_size=None),
        speculative_config=changed.pop("speculative_config", None),
        lora_config=None,
    )


@pytest.mark.parametrize(
    "option",
    [
        *({f"{size}_parallel_size": 2} for size in ("prefill_context", "decode_context")),
        {"enable_elastic_ep": True},
        {"speculative_config": SimpleNamespace(method="mtp")},
    ],
    ids=lambda option: next(iter(option)),
)
def test_ranks_of_another_kind_are_refused(option: dict[str, Any]) -> None:
    from deepinfer_plugin.model.checks import check_engine_options

    check_engine_options(engine_options())
    with pytest.raises(ConfigError, match=f"{next(iter(option))}.* is .*, expected"):
        check_engine_options(engine_options(**option))


def test_another_model_keeps_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepinfer_plugin import answer_provenance
    from deepinfer_plugin import translate as module

    monkeypatch.setattr(answer_provenance, "_NOTED", answer_provenance._Noted())
    monkeypatch.setenv("DEEPINFER_METRICS_DIR", str(tmp_path))
    monkeypatch.setenv(ZERO, "0")
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    for model_type, expected in (("llama", None), ("deepseek_v41", False)):
        flags, config = (
            Flags(),
            SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type), model="no/where", revision=None),
        )
        assert module._create_model_config(lambda self, found=config: found, flags) is config
        assert flags.async_scheduling is expected
        assert ("error" in answer_provenance.of_answer(None)) is (model_type == "llama")


# Makes the configuration of an engine under several environments in one process, as vllm serve and LLM do.
SCRIPT = """
import json, os, sys
from vllm import EngineArgs
found = []
for variables, flags in json.loads(sys.argv[2]):
    os.environ.update(variables)
    try:
        EngineArgs(model=sys.argv[1], kv_cache_memory_bytes=1 << 20, **flags).create_engine_config()
        found.append(None)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""


def test_a_start_is_refused_and_goes_on_through_vllms_own_configuration(checkpoint: Any) -> None:
    attempts: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({N: "5"}, {"speculative_config": {"method": "dspark", "num_speculative_tokens": 4}}),
        ({ZERO: "0"}, {"async_scheduling": True}),
        ({ZERO: "0", FORCE: "1", N: "2"}, {}),
    ]
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **{v.name: None for v in VARIABLES}}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint("nano", 0)), json.dumps(attempts)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=envs.child_environment(variables), check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    drafts, scheduling, fine = json.loads(result.stdout.splitlines()[-1])
    assert f"SettingError: settings: {N} is '5', but the flag is --speculative-config" in drafts
    assert f"{ZERO} is '0', but the flag is --async-scheduling" in scheduling
    assert fine is None
