"""What the engine process really computes with: a hash of every function that is in place, by name.

Files on disk say what was installed. This says what runs: a function that was replaced in the process, or a constant
that was changed, has another hash under its own name, and whoever repeats a result can name the kernel that differs.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

PACKAGES = (
    "deepinfer_kernels",
    "deepinfer_batch_invariant",
    "deepinfer_plugin.model",
    "deepinfer_plugin.cache",
    "deepinfer_plugin.draft",
    "deepinfer_plugin.eplb",
    "deepinfer_plugin.images",
    "deepinfer_plugin.replay",
    "deepinfer_plugin.sampling",
    "deepinfer_plugin.speculative",
    "deepinfer_plugin.worker",
)
CLASS_PATH = f"{__name__}.LiveCode"
HASH_DIGITS = 16
_NOT_ENGINE = ("test_", "bench", "faults", "record_faults", "conftest", "testing", "simulate", "corpus", "__main__")
_ONE_PLATFORM = (
    "deepinfer_plugin.worker.cpu_",
    "deepinfer_plugin.worker.cuda_",
)  # importing them elsewhere would change the process
_PLAIN = (bool, int, float, str, bytes, type(None))


class LiveCode:
    """Worker extension of vLLM: adds one method that the API server can call in the engine process."""

    def deepinfer_live_code(self) -> dict[str, str]:
        """See ``live_code``."""
        return live_code()


def live_code() -> dict[str, str]:
    """Hash of each function, method and plain constant of the modules that compute an answer, in this process.

    Returns:
        ``module.name`` to the first 16 hex digits of a SHA-256 over the code object, what it refers to by name, its
        plain defaults, and the name it was defined under; equal between processes of one Python version.
    """
    found: dict[str, str] = {}
    for module in _modules():
        for name, value in sorted(vars(module).items()):
            if name.startswith("__") or isinstance(value, ModuleType):
                continue
            for suffix, text in _described(value, module.__name__):
                digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
                found[f"{module.__name__}.{name}{suffix}"] = digest[:HASH_DIGITS]
    return found


def _modules() -> Iterator[ModuleType]:
    """The same modules whenever it is asked, also those that the engine has not needed yet."""
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        yield package
        for entry in sorted(pkgutil.walk_packages(package.__path__, f"{package_name}."), key=lambda e: e.name):
            if entry.name.rpartition(".")[2].startswith(_NOT_ENGINE):
                continue
            if entry.name.startswith(_ONE_PLATFORM) and entry.name not in sys.modules:
                continue
            try:
                yield importlib.import_module(entry.name)
            except ImportError:  # a kernel for another kind of device: nothing of it can run here
                continue


def _described(value: Any, module: str) -> Iterator[tuple[str, str]]:
    """(suffix of the name, text to hash) of a module's attribute; nothing for values that have no stable text."""
    if inspect.isclass(value):
        if value.__module__ != module:
            yield "", f"class {value.__module__}.{value.__qualname__}"
            return
        for name, member in sorted(vars(value).items()):
            text = _function_text(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
            if text:
                yield f".{name}", text
        return
    text = _function_text(value)
    if text:
        yield "", text
    elif _is_plain(value):
        yield "", repr(value)


def _function_text(value: Any) -> str:
    inner = getattr(value, "__wrapped__", None) or getattr(value, "fn", None)  # decorated; a Triton kernel
    if isinstance(value, FunctionType):
        own = f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)} {_defaults_text(value)}"
        return own + (_function_text(inner) if inner is not None else "")
    return _function_text(inner) if isinstance(inner, FunctionType) else ""


def _defaults_text(function: FunctionType) -> str:
    defaults = (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))
    return repr([value for value in defaults if _is_plain(value)])


def _code_text(code: CodeType) -> str:
    constants = ",".join(_constant_text(constant) for constant in code.co_consts)
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} [{constants}]"


def _constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):  # its order depends on the process
        return f"{{{','.join(sorted(map(repr, constant)))}}}"
    return repr(constant)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)
