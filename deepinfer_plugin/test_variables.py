"""Every variable on both sides of every bound: what is accepted comes back as its value, what is not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from deepinfer_plugin import envs, variables
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.replay.settings import EncoderPolicy
from deepinfer_plugin.value_kinds import FLAG
from deepinfer_plugin.variables import VARIABLES

FLAGS = {
    "1": True,
    "true": True,
    "True": True,
    "yes": True,
    " ": True,
    "0": False,
    "": False,
    "false": False,
    "False": False,
}
NOT_INTEGERS = ("", "1.0", "1e3", " 1", "1 ", "one", "0x10", "+1", "1_000", "--1", "-", "٣", "9" * 20)
PATHS: Mapping[str, object] = {"": None, "/a b/c": Path("/a b/c"), "x": Path("x")}

# variable -> (text: value on the inner side of each bound, texts on the outer side). A boolean has no outer side.
BOUNDS: dict[str, tuple[Mapping[str, object], tuple[str, ...]]] = {
    "DEEPINFER_ACCELERATOR": (
        {word: word for word in ("auto", "nvidia", "ascend", "cpu")},
        ("", "gpu", "CPU", "cpu ", "auto,cpu"),
    ),
    "DEEPINFER_BATCH_INVARIANT": (FLAGS, ()),
    "DEEPINFER_DISABLE": (FLAGS, ()),
    "DEEPINFER_ARITHMETIC": ({word: word for word in ("ref", "q32", "s32")}, ("", "fp32", "REF")),
    "DEEPINFER_KERNEL_SET": ({word: word for word in ("triton", "tilelang")}, ("", "TileLang", "triton ", "cuda")),
    "DEEPINFER_CERTIFICATE": (PATHS, ("\0",)),
    "DEEPINFER_METRICS_DIR": (PATHS, ("\0",)),
    "DEEPINFER_HF_MODEL_DIR": (PATHS, ("a\0b",)),
    "DEEPINFER_USE_NEXTN_DECODE": ({"0": 0, "1": 1, "5": 5, "003": 3}, ("-1", "6", *NOT_INTEGERS)),
    "DEEPINFER_ENABLE_MTP_VARLEN": (FLAGS, ()),
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": (
        {
            "1": (1.0,),
            "1.0": (1.0,),
            ".5": (0.5,),
            "1e-5": (1e-5,),
            "1e-6": (1e-5,),
            "0.00000001": (1e-5,),
            "1,2,0.3": (1.0, 2.0, 0.3),
        },
        ("", "0", "0.0", "-1", "1,", ",1", "1,0", "1;2", "1, 2", "inf", "nan", "1e400", "1e-999", "abc"),
    ),
    "DEEPINFER_DECODE_PERF_CACHE_DIR": (PATHS, ("\0",)),
    "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC": ({"1": 1, "3600": 3600}, ("0", "-1", *NOT_INTEGERS)),
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": (
        {word: word for word in ("off", "mask", "compact")},
        ("", "0", "on", "Mask", "compact,mask"),
    ),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": ({"1": 1, "134": 134, "140": 140}, ("0", "-1", *NOT_INTEGERS)),
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": ({"0": 0, "6": 6}, ("-1", *NOT_INTEGERS)),
    "DEEPINFER_ENCODER_REPLAY": (
        {
            "exact": EncoderPolicy(),
            "bounded": EncoderPolicy(kind="bounded"),
            "segment:1": EncoderPolicy(kind="segment", segment=1),
            "segment:999999999": EncoderPolicy(kind="segment", segment=999999999),
        },
        ("", "off", "exact:", "segment", "segment:", "segment:0", "segment:-1", "segment:1000000000", "segment:٣"),
    ),
    "DEEPINFER_ALLOW_APPROXIMATE_REPLAY": (FLAGS, ()),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": (FLAGS, ()),
    "DEEPINFER_XGRAMMAR_TIMEOUT": ({"1": 1, "20": 20}, ("0", "-1", *NOT_INTEGERS)),
    "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES": (
        {"-1": -1, "0": 0, "10737418240": 10737418240},
        ("-2", "10737418241", *NOT_INTEGERS),
    ),
    "DEEPINFER_EPLB_POLICY": (
        {word: word for word in ("summed_peak", "vllm", "rotate", "uneven")},
        ("", "default", "Vllm", "vllm "),
    ),
    "DEEPINFER_EPLB_COUNT_PREFILL": (FLAGS, ()),
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": ({"0": 0, "1": 1, "32": 32}, ("-1", *NOT_INTEGERS)),
    "DEEPINFER_RANKS_PER_GPU": ({"1": 1, "2": 2, "8": 8}, ("0", "9", *NOT_INTEGERS)),
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": (FLAGS, ()),
    "DEEPINFER_SAMPLER_FORCE_TOPK": ({"0": 0, "1": 1, "50": 50}, ("-1", *NOT_INTEGERS)),
    "DEEPINFER_DECODE_TOKEN_BLACKLIST": (
        {
            "": (),
            "0": ((0, 0),),
            "5": ((5, 5),),
            "5-5": ((5, 5),),
            "1,3-7,9": ((1, 1), (3, 7), (9, 9)),
            "999999999": ((999999999, 999999999),),
        },
        ("-1", "5-4", "1,", ",", "1;2", "1, 2", "1-2-3", "a", "1-", "-", "1000000000"),
    ),
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": (FLAGS, ()),
    "DEEPINFER_LOGGING_INTERVAL_STEP": ({"0": 0, "1": 1, "100": 100}, ("-1", *NOT_INTEGERS)),
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K": ({"0": 0, "1": 1, "128": 128}, ("-1", *NOT_INTEGERS)),
    "DEEPINFER_JIT_CACHE_DIR": (PATHS, ("\0",)),
}
INSIDE = [(name, text, value) for name, (inside, _) in BOUNDS.items() for text, value in inside.items()]
OUTSIDE = [(name, text) for name, (_, outside) in BOUNDS.items() for text in outside]


def test_every_variable_has_its_cases() -> None:
    assert set(BOUNDS) == {variable.name for variable in VARIABLES}
    for variable in VARIABLES:
        inside, outside = BOUNDS[variable.name]
        assert inside
        assert bool(outside) is (variable.kind is not FLAG), variable.name


@pytest.mark.parametrize(("name", "text", "value"), INSIDE)
def test_a_value_inside_the_rule_is_read(name: str, text: str, value: object) -> None:
    variable = next(v for v in VARIABLES if v.name == name)
    environment = envs.load({name: text})
    assert environment[variable] == value
    assert type(environment[variable]) is type(value)
    assert environment.is_set(variable)


@pytest.mark.parametrize(("name", "text"), OUTSIDE)
def test_a_value_outside_the_rule_is_refused_with_variable_value_and_rule(name: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        envs.load({name: text})
    rule = next(v.kind.rule for v in VARIABLES if v.name == name)
    assert f"{name} is {text!r}, expected {rule}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_asks_for_nothing_that_is_not_built() -> None:
    defaults = {variable.name: variable.default for variable in VARIABLES}
    assert envs.refusals(envs.load(defaults), is_our_model=True) == []
    assert envs.refusals(envs.load({}), is_our_model=True) == []


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.not_built], ids=lambda v: v.name)
def test_a_value_that_asks_for_what_is_not_built_is_refused_by_name(variable: variables.Variable[object]) -> None:
    default = variable.parse(variable.default)
    asking = [text for text, value in BOUNDS[variable.name][0].items() if value != default]
    assert asking
    for text in asking:
        [sentence] = envs.refusals(envs.load({variable.name: text}), is_our_model=True)
        assert f"{variable.name} is {text!r}, which asks for {variable.feature}, and that is not built" in sentence
        with_vllm = envs.refusals(envs.load({variable.name: text}), is_our_model=False)
        assert with_vllm == ([] if variable.has_vllm_form else [sentence])


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.needs_our_model], ids=lambda v: v.name)
def test_a_value_that_only_our_model_acts_on_is_refused_where_vllms_serves(
    variable: variables.Variable[object],
) -> None:
    default = variable.parse(variable.default)
    for text, value in BOUNDS[variable.name][0].items():
        environment = envs.load({variable.name: text})
        assert envs.refusals(environment, is_our_model=True) == []
        found = envs.refusals(environment, is_our_model=False)
        assert len(found) == (value != default)
        for sentence in found:
            assert f"{variable.name} is {text!r}, which asks for {variable.feature}, and that is not built" in sentence
            assert "for vLLM's own model, which serves with DEEPINFER_BATCH_INVARIANT=0" in sentence


@pytest.mark.parametrize("family", variables.FAMILIES, ids=lambda family: family.prefix)
@pytest.mark.parametrize("is_our_model", [True, False])
def test_a_family_is_known_and_only_off_is_accepted(family: variables.Family, is_our_model: bool) -> None:
    name = f"{family.prefix}SOMETHING"
    assert envs.warnings({name: "1"}) == []
    for text in ("0", "", "false", "False"):
        assert envs.refusals(envs.load({name: text}), is_our_model=is_our_model) == []
    for text in ("1", "100", "true"):
        [sentence] = envs.refusals(envs.load({name: text}), is_our_model=is_our_model)
        assert f"{name} is {text!r}, which asks for {family.feature}" in sentence
