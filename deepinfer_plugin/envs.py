"""Every DEEPINFER_* variable: type, default, bounds. The only module that touches the process environment.

Importing it loads neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfer_plugin.errors import PlatformError, SettingError

PREFIX = "DEEPINFER_"
_FALSE = ("0", "", "false", "False")
_TRUE = ("1", "true", "True")


def _parse_bool(text: str) -> bool:
    if text in _FALSE:
        return False
    if text in _TRUE:
        return True
    raise ValueError


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One DEEPINFER_* variable: how it is written, what it may be, and what it does."""

    name: str
    default: str
    rule: str
    parse: Callable[[str], object]
    meaning: str


_BOOL_RULE = "0 or false, 1 or true"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="DEEPINFER_ACCELERATOR",
        default="auto",
        rule="auto, nvidia, ascend or cpu",
        parse=_one_of("auto", "nvidia", "ascend", "cpu"),
        meaning="the kind of machine; auto takes what is found, cpu also leaves a GPU unused",
    ),
    Variable(
        name="DEEPINFER_BATCH_INVARIANT",
        default="1",
        rule=_BOOL_RULE,
        parse=_parse_bool,
        meaning="1: our model, whose rows do not depend on other requests; 0: vLLM's own model serves the architecture",
    ),
    Variable(
        name="DEEPINFER_ARITHMETIC",
        default="ref",
        rule="ref, q32 or s32",
        parse=_one_of("ref", "q32", "s32"),
        meaning="for tests: q32 computes activations in fp32, s32 also quantises none of them",
    ),
    Variable(
        name="DEEPINFER_DISABLE",
        default="0",
        rule=_BOOL_RULE,
        parse=_parse_bool,
        meaning="1: the plugin adds nothing to vLLM in this process",
    ),
)

# DeepInfer's own variables that this version does not act on: setting one is answered with a warning, never silence.
NOT_ACTED_ON: tuple[str, ...] = (
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS",
    "DEEPINFER_DECODE_PERF_CACHE_DIR",
    "DEEPINFER_DECODE_TOKEN_BLACKLIST",
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
    "DEEPINFER_JIT_CACHE_DIR",
    "DEEPINFER_LOGGING_INTERVAL_STEP",
    "DEEPINFER_MAX_BACKTRACKING_TOKENS",
    "DEEPINFER_PREFILL_ATTEMPT_INTERVAL",
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K",
    "DEEPINFER_SAMPLER_FORCE_TOPK",
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_XGRAMMAR_TIMEOUT",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The parsed DEEPINFER_* variables of one process."""

    accelerator: str
    batch_invariant: bool
    arithmetic: str
    disable: bool


def parse(name: str, text: str) -> object:
    """Parse the text of one variable.

    Raises:
        SettingError: the value is outside the rule; the text names variable, value and rule.
    """
    variable = next(v for v in VARIABLES if v.name == name)
    try:
        return variable.parse(text)
    except ValueError:
        raise SettingError(
            f"environment: {name} is {text!r}, expected {variable.rule}; correct it or unset it "
            f"(default {variable.default})"
        ) from None


def load(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check all variables.

    Args:
        environ: the variables to read; None reads those of this process.

    Raises:
        SettingError: a value is outside its rule.
    """
    source = os.environ if environ is None else environ
    values = {v.name: parse(v.name, source.get(v.name, v.default)) for v in VARIABLES}
    return Environment(
        accelerator=str(values["DEEPINFER_ACCELERATOR"]),
        batch_invariant=bool(values["DEEPINFER_BATCH_INVARIANT"]),
        arithmetic=str(values["DEEPINFER_ARITHMETIC"]),
        disable=bool(values["DEEPINFER_DISABLE"]),
    )


def sources(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each variable of ours ``environment`` if it is set, else ``default``."""
    source = os.environ if environ is None else environ
    return {v.name: "environment" if v.name in source else "default" for v in VARIABLES}


def warnings(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each DEEPINFER_* variable that is set and has no effect."""
    source = os.environ if environ is None else environ
    known = [v.name for v in VARIABLES]
    found: list[str] = []
    for name in sorted(source):
        if not name.startswith(PREFIX) or name in known:
            continue
        if name in NOT_ACTED_ON:
            found.append(f"environment: {name} is set, but this version of the plugin does not act on it; unset it")
            continue
        nearest = difflib.get_close_matches(name, [*known, *NOT_ACTED_ON], n=1, cutoff=0.0)[0]
        found.append(f"environment: {name} is not a variable of the plugin and has no effect; the nearest is {nearest}")
    return found


def vllm_target_device() -> str | None:
    """The text of VLLM_TARGET_DEVICE, or None where it is not set."""
    return os.environ.get("VLLM_TARGET_DEVICE")


def cuda_visible_devices() -> str | None:
    """The text of CUDA_VISIBLE_DEVICES, or None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def allowed_plugins() -> list[str] | None:
    """Entry-point names listed in VLLM_PLUGINS, or None where every plugin is allowed."""
    text = os.environ.get("VLLM_PLUGINS")
    return None if text is None else text.split(",")


def set_variable(name: str, text: str) -> None:
    """Set one of our variables for this process and its future children.

    Raises:
        SettingError: the value is outside its rule.
    """
    parse(name, text)
    os.environ[name] = text


def child_environment(overrides: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """A copy of this process's environment for a child, with some variables set, or removed where the value is None."""
    environment = dict(os.environ)
    for name, value in (overrides or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _forget_compiled_triton() -> None:
    """Make the next ``import triton`` load it anew, with its interpreter.

    ``import torch`` of PyTorch 2.14 imports Triton long before vLLM asks for a platform. Nothing has used it by then;
    what counts is that vLLM's and our kernels are decorated by the module loaded with the variables set. The compiled
    extension below ``triton._C`` does not know of the interpreter and cannot be loaded twice, so it stays.
    """
    if "vllm.triton_utils" in sys.modules:
        raise PlatformError(
            "CPU platform: vllm.triton_utils is imported without Triton's interpreter, expected TRITON_INTERPRET=1 "
            "before; set TRITON_INTERPRET=1 and CUDA_VISIBLE_DEVICES= in the environment"
        )
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        if not name.startswith("triton._C"):
            del sys.modules[name]


def prepare_interpreter_environment() -> None:
    """Set what vLLM's model runner V2 and Triton's interpreter need on a machine without an accelerator.

    Must run in each process before Triton is first imported: the empty CUDA_VISIBLE_DEVICES makes vLLM keep Triton
    although there is no driver, and TRITON_INTERPRET is read while Triton's own functions are being decorated.
    Child processes inherit the variables.

    Raises:
        PlatformError: vLLM's kernels are already bound to compiled Triton, or the user's variables contradict the lane.
    """
    runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    if runner != "1":
        raise PlatformError(f"CPU platform: VLLM_USE_V2_MODEL_RUNNER is {runner!r}, expected 1; unset it")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        _forget_compiled_triton()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # Two threads on a busy machine cost an order of magnitude; one also fixes the order of torch's own sums.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM imports Humming, whose import starts two Python processes that compile CUDA code; nothing here can run it.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")


def keep_engine_in_this_process() -> None:
    """Let vLLM's engine core run in the calling process unless the user chose otherwise.

    It starts in half the time, and an interrupt reaches one process instead of three.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


VLLM_SWITCH = "VLLM_BATCH_INVARIANT"


def pin_vllm_batch_invariance(device: str) -> None:
    """Make vLLM's own switch agree with ours, for this process and its children, once our model is being served.

    On a GPU vLLM's collectives and libraries follow it. On the CPU it would replace sums and products of PyTorch by
    interpreted Triton kernels, which our table of proven operations does not know.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        SettingError: the user set it to the other value.
    """
    wanted = "1" if device == "cuda" else "0"
    found = os.environ.get(VLLM_SWITCH)
    if found is not None and found != wanted:
        raise SettingError(
            f"{VLLM_SWITCH} is {found!r}, expected {wanted!r} with DEEPINFER_BATCH_INVARIANT=1 on {device}; unset "
            f"{VLLM_SWITCH}, the plugin sets what its mode needs"
        )
    os.environ[VLLM_SWITCH] = wanted


def enter_batch_invariant_mode(device: str) -> None:
    """Set the mode's pins in this process.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        PinError: a library's switch has another value than the mode needs.
    """
    from deepinfer_batch_invariant import mode

    mode.enter(device, os.environ)
