"""Replace a function of ours wherever it is referred to, and put it back: for counters and for planted faults."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

OURS = ("deepinfer_kernels", "deepinfer_plugin", "deepinfer_batch_invariant")
Function = Callable[..., Any]


def find(path: str) -> tuple[Any, str, Function]:
    """Owner, attribute and function of ``module:function`` or ``module:Class.method``."""
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute, getattr(owner, attribute)


@contextmanager
def replaced(path: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """Put ``make(original)`` in the place of a function in every loaded module of ours that names it.

    Modules that are loaded later see the original: import what should be patched before.
    """
    owner, attribute, original = find(path)
    changed = make(original)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(owner, attribute, changed))
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] not in OURS:
                continue
            for alias, value in list(vars(module).items()):
                if value is original:
                    stack.enter_context(mock.patch.object(module, alias, changed))
        yield


def load_model_modules() -> None:
    """Import everything of ours that an engine uses, so that ``replaced`` reaches it."""
    for module in (
        "deepinfer_plugin.model.flash",
        "deepinfer_plugin.sampling.force",
        "deepinfer_plugin.sampling.prompt_logprobs",
        "deepinfer_plugin.worker.model_state",
    ):
        importlib.import_module(module)
