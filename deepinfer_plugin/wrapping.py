"""Wraps a method or property of vLLM, once per process, if it is the one we know. ``compat.PATCHES`` lists them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from deepinfer_plugin.errors import PlatformError

IS_OURS = "_deepinfer_wraps"


def wrap(
    owner: type, name: str, parameters: tuple[str, ...], around: Callable[..., Any], *, has_no_other: bool = False
) -> None:
    """Replace ``owner.name`` by a function that calls ``around(original, *args, **kwargs)``.

    Args:
        owner: a class of vLLM.
        name: its method, or a property that is only read; wrapping it again changes nothing.
        parameters: names that its signature must begin with; the first is ``cls`` for a class method.
        around: what runs instead, given the original as its first argument.
        has_no_other: ``parameters`` are all that it has, for an ``around`` that does not pass on what it does not know.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    found = inspect.getattr_static(owner, name, None)
    is_class_method = isinstance(found, classmethod)
    original = _function_of(found)
    if getattr(original, IS_OURS, False):
        return
    names = tuple(inspect.signature(original).parameters) if callable(original) else ()
    compared = names if has_no_other else names[: len(parameters)]
    if compared != parameters or is_class_method != (parameters[0] == "cls"):
        raise PlatformError(
            f"wrapping: {owner.__name__}.{name} has the parameters {list(names)}, expected {list(parameters)} "
            f"{'and no other' if has_no_other else 'first'}; install a vLLM version that this plugin supports"
        )
    assert callable(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, IS_OURS, True)
    kind = type(found) if isinstance(found, classmethod | property) else None
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def _function_of(found: Any) -> Any:
    match found:
        case property():
            return found.fget
        case classmethod():
            return found.__func__
        case _:
            return found
