"""Typed reading of JSON objects into the fields of a dataclass: missing words and wrong types end here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from deepinfer_plugin.errors import ConfigError


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_int_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(item) for item in value)


# Annotation -> what a JSON value must satisfy, its name in messages, and its conversion.
_READERS: dict[object, tuple[Callable[[object], bool], str, Callable[[Any], object]]] = {
    int: (_is_int, "an integer", int),
    float: (_is_number, "a finite number", float),
    float | None: (
        lambda value: value is None or _is_number(value),
        "a finite number or null",
        lambda value: None if value is None else float(value),
    ),
    bool: (lambda value: isinstance(value, bool), "true or false", bool),
    str: (lambda value: isinstance(value, str), "a string", str),
    tuple[int, ...]: (_is_int_list, "a list of integers", tuple),
}


def section(parent: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The JSON object under the last word of ``path`` (words joined by dots).

    Raises:
        ConfigError: it is missing or is not an object.
    """
    value = parent.get(path.rpartition(".")[2])
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"ModelConfig: {path} is {'missing' if value is None else repr(value)}, expected a JSON object; "
            "restore it from the released config.json"
        )
    return value


def read_fields(cls: type, source: Mapping[str, Any], path: str, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Values of the plain fields of the dataclass ``cls``, read from a JSON object.

    Args:
        cls: a dataclass; fields of other types than numbers, strings, flags and integer lists are left out.
        source: the JSON object.
        path: where ``source`` stands in config.json, "" for the top level; for messages.
        only: the fields to read; None: all.

    Returns:
        Field name to value, lists as tuples.

    Raises:
        ConfigError: a word is missing or has the wrong type.
    """
    values: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls).items():
        if (only is not None and name not in only) or annotation not in _READERS:
            continue
        where = f"{path}.{name}" if path else name
        fits, wanted, convert = _READERS[annotation]
        if name not in source:
            raise ConfigError(
                f"ModelConfig: {where} is missing, expected {wanted}; restore it from the released config.json"
            )
        if not fits(source[name]):
            raise ConfigError(f"ModelConfig: {where} is {source[name]!r}, expected {wanted}; correct config.json")
        values[name] = convert(source[name])
    return values


def refuse_unknown(cls: type, source: Mapping[str, Any], path: str) -> None:
    """Refuse words in a section where every word changes what the numbers mean.

    Raises:
        ConfigError: ``source`` has a word that is no field of ``cls``.
    """
    known = get_type_hints(cls)
    for name in sorted(source):
        if name not in known:
            raise ConfigError(
                f"ModelConfig: {path}.{name} is {source[name]!r}, expected only {', '.join(known)} in {path}; "
                "this checkpoint needs something that is not implemented"
            )
