"""The process environment: reading DEEPINFER_* variables by their table, and what children and vLLM need set.

The only module that touches the environment. Importing it loads neither torch nor vLLM.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deepinfer_plugin.errors import PlatformError, SettingError
from deepinfer_plugin.value_kinds import FALSE, FLAG, LOOKS_FALSE
from deepinfer_plugin.variables import (
    FAMILIES,
    JIT_CACHE_DIR,
    METRICS_DIR,
    PREFIX,
    VARIABLES,
    XGRAMMAR_CACHE_LIMIT_BYTES,
    Family,
    Variable,
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The parsed DEEPINFER_* variables of one process: ``environment[variables.ACCELERATOR]``."""

    values: Mapping[str, object]
    texts: Mapping[str, str]  # of the variables that are set, members of families included

    def __getitem__[T](self, variable: Variable[T]) -> T:
        return cast(T, self.values[variable.name])

    def is_set(self, variable: Variable[Any]) -> bool:
        """Whether the variable stands in the environment, be it with its default."""
        return variable.name in self.texts

    def describe(self, variable: Variable[Any]) -> str:
        """``NAME is 'text'`` for an error that is about a set variable."""
        return f"{variable.name} is {self.texts.get(variable.name, variable.default)!r}"


def family_of(name: str) -> Family | None:
    """The family that a name belongs to, if it is not a variable of its own."""
    return None if name in _BY_NAME else next((f for f in FAMILIES if name.startswith(f.prefix)), None)


def parse(name: str, text: str) -> object:
    """Parse the text of one variable.

    Raises:
        SettingError: the value is outside the rule; the text names variable, value and rule.
    """
    variable = _BY_NAME[name]
    try:
        return variable.parse(text)
    except ValueError:
        default = f"default {variable.default}" if variable.default else "no default"
        raise SettingError(
            f"environment: {name} is {text!r}, expected {variable.kind.rule}; correct it or unset it ({default})"
        ) from None


def load(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check all variables.

    Args:
        environ: the variables to read; None reads those of this process.

    Raises:
        SettingError: a value is outside its rule.
    """
    source = os.environ if environ is None else environ
    return _parsed(tuple(sorted(item for item in source.items() if item[0].startswith(PREFIX))))


@functools.lru_cache(maxsize=8)
def _parsed(found: tuple[tuple[str, str], ...]) -> Environment:
    """Parsed once for as long as no text changes: every request asks for its server's defaults."""
    source = dict(found)
    values = {v.name: parse(v.name, source.get(v.name, v.default)) for v in VARIABLES}
    texts = {name: text for name, text in found if name in _BY_NAME or family_of(name) is not None}
    return Environment(values=values, texts=texts)


def refusals(environment: Environment, *, is_our_model: bool) -> list[str]:
    """One sentence for each variable that asks for a feature which the serving model does not have.

    Args:
        environment: from ``load``.
        is_our_model: False where vLLM's own model serves, which has some features that ours lacks.
    """
    found: list[str] = []
    for name, text in environment.texts.items():
        variable, family = _BY_NAME.get(name), family_of(name)
        if family is not None and text not in FALSE:
            found.append(_refusal(name, text, family.feature, family.not_built, "unset it"))
        if variable is None or environment[variable] == variable.parse(variable.default):
            continue
        reason = variable.lack(is_our_model=is_our_model)
        if reason:
            advice = f"set {variable.default} or unset it" if variable.default else "unset it"
            found.append(_refusal(name, text, variable.feature, reason, advice))
    return found


def _refusal(name: str, text: str, feature: str, reason: str, advice: str) -> str:
    return f"environment: {name} is {text!r}, which asks for {feature}, and that is not built ({reason}); {advice}"


def sources(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each variable of ours ``environment`` if it is set, else ``default``."""
    source = os.environ if environ is None else environ
    return {v.name: "environment" if v.name in source else "default" for v in VARIABLES}


def warnings(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each DEEPINFER_* variable that is unknown, or whose value likely means the opposite."""
    source = os.environ if environ is None else environ
    found: list[str] = []
    for name in sorted(source):
        if not name.startswith(PREFIX) or family_of(name) is not None:
            continue
        variable = _BY_NAME.get(name)
        if variable is None:
            known = [*_BY_NAME, *(family.prefix for family in FAMILIES)]
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            found.append(
                f"environment: {name} is not a variable of the plugin and has no effect; the nearest is {nearest}"
            )
        elif variable.kind is FLAG and variable.parse(source[name]) and LOOKS_FALSE.fullmatch(source[name]):
            found.append(f"environment: {name} is {source[name]!r}, which counts as on; write 0 to turn it off")
    return found


def vllm_target_device() -> str | None:
    """The text of VLLM_TARGET_DEVICE, or None where it is not set."""
    return os.environ.get("VLLM_TARGET_DEVICE")


def cuda_visible_devices() -> str | None:
    """The text of CUDA_VISIBLE_DEVICES, or None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def ascend_home() -> str | None:
    """The text of ASCEND_HOME_PATH, where CANN's own script puts its folder; None where it is not set."""
    return os.environ.get("ASCEND_HOME_PATH")


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


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set some variables for the life of the context: ours, or vLLM's, which vLLM checks.

    Raises:
        SettingError: a value is outside its rule.
    """
    before = {name: os.environ.get(name) for name in values}
    for name, text in values.items():
        if name.startswith("VLLM_"):
            os.environ[name] = text
        else:
            set_variable(name, text)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


def metrics_folder() -> Path | None:
    """The folder of DEEPINFER_METRICS_DIR; None where it is not set."""
    return load()[METRICS_DIR]


def prepare_metrics_folder() -> None:
    """Name a folder that this process and its children share for their figures, unless the user has named one.

    A temporary folder is removed when the process ends.

    Raises:
        SettingError: the folder that the user named cannot be made.
    """
    named = metrics_folder()
    if named is None:
        folder = tempfile.mkdtemp(prefix="deepinfer-metrics-")
        os.environ[METRICS_DIR.name] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return
    try:
        named.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"environment: {METRICS_DIR.name} is {str(named)!r}, which cannot be made ({error}); name a folder that can"
        ) from None


def child_environment(overrides: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """A copy of this process's environment for a child, with some variables set, or removed where the value is None."""
    environment = dict(os.environ)
    for name, value in (overrides or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


TRITON_CACHE_SWITCH = "TRITON_CACHE_DIR"
TILELANG_CACHE_SWITCH = "TILELANG_CACHE_DIR"


def use_kernel_cache(folder: Path | None) -> None:
    """Let Triton keep compiled kernels in ``folder``, for this process and its children; None leaves the choice to it.

    Triton reads its variable whenever it looks for a kernel, so the moment does not matter.

    Raises:
        SettingError: the folder cannot be made or written, or Triton's own variable names another one.
    """
    if folder is None:
        return
    where = f"environment: {JIT_CACHE_DIR.name} is {str(folder)!r}"
    wanted = str(folder.absolute())
    found = os.environ.get(TRITON_CACHE_SWITCH)
    if found is not None and found != wanted:
        raise SettingError(
            f"{where} and {TRITON_CACHE_SWITCH} is {found!r}, expected one folder of compiled kernels; unset one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingError(
            f"{where}, no folder that can be written ({error.strerror}), expected one; name another or unset it"
        ) from None
    os.environ[TRITON_CACHE_SWITCH] = wanted
    os.environ.setdefault(TILELANG_CACHE_SWITCH, str(folder.absolute() / "tilelang"))


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
    # vLLM wants a NUMA node for every worker to bind its threads to; a worker of ours has one thread.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


WORKER_START_SWITCH = "VLLM_WORKER_MULTIPROC_METHOD"


@contextmanager
def worker_start_kept() -> Iterator[None]:
    """Let the user's choice of how vLLM starts its workers stand, which code in the context writes over."""
    before = os.environ.get(WORKER_START_SWITCH)
    try:
        yield
    finally:
        if before is not None:
            os.environ[WORKER_START_SWITCH] = before


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


XGRAMMAR_CACHE_SWITCH = "VLLM_XGRAMMAR_CACHE_MB"
_NO_LIMIT_MIB = str(1 << 20)  # a TiB: vLLM has no word for none
_XGRAMMAR_COMPILERS = 2  # of vLLM: with and without special tokens, each with a cache of its own


def limit_grammar_cache(limit_bytes: int) -> None:
    """Translate the limit on compiled grammars for this process and its children.

    Args:
        limit_bytes: of both of vLLM's caches together; -1 for none.

    Raises:
        SettingError: vLLM's own variable is set to another value.
    """
    wanted = _NO_LIMIT_MIB if limit_bytes < 0 else str(limit_bytes // _XGRAMMAR_COMPILERS // (1 << 20))
    found = os.environ.get(XGRAMMAR_CACHE_SWITCH)
    if found is not None and found != wanted:
        raise SettingError(
            f"{XGRAMMAR_CACHE_SWITCH} is {found!r}, expected {wanted!r} with {XGRAMMAR_CACHE_LIMIT_BYTES.name} "
            f"{limit_bytes}; unset one of the two"
        )
    os.environ[XGRAMMAR_CACHE_SWITCH] = wanted


NCCL_SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


def let_ranks_share_gpus() -> None:
    """Let NCCL take several ranks on a GPU, in this process and its children."""
    os.environ[NCCL_SHARING_SWITCH] = "1"


MEDIA_REDIRECTS_SWITCH = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"


def refuse_media_redirects() -> None:
    """Keep vLLM from following a host that the operator allowed to one that nobody did, unless the user says so."""
    os.environ.setdefault(MEDIA_REDIRECTS_SWITCH, "0")


def enter_batch_invariant_mode(device: str) -> None:
    """Set the mode's pins in this process.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        PinError: a library's switch has another value than the mode needs.
    """
    from deepinfer_batch_invariant import mode

    mode.enter(device, os.environ)


def check_batch_invariant_pins(device: str) -> None:
    """Refuse to go on where a variable of the mode is missing or has another value.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        PinError: names the variable.
    """
    from deepinfer_batch_invariant import mode

    mode.check_environment(device, os.environ)
