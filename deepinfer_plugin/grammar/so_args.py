"""``so_args``: DeepInfer's form of structured output, translated to vLLM's parameter.

A request gives it in ``extra_args`` (``vllm_xargs`` of the server, which takes it as a JSON text): ``schema_type``
(``json``, ``regex`` or ``ebnf``) and ``schema``; and, if the grammar is to start later, ``trigger_token_ids`` and
``bound_token_id``, see ``trigger.py``. Without a trigger the grammar applies from the first token, reasoning or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

EXTRA_ARG = "so_args"
TRIGGER_ARG = "deepinfer_trigger_token_ids"  # what the engine's process reads
BOUND_ARG = "deepinfer_bound_token_id"
FIELD_OF_TYPE = {"json": "json", "regex": "regex", "ebnf": "grammar"}
KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
MAX_TRIGGER = 64  # ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SoArgs:
    """Checked arguments."""

    schema_type: str
    schema: str
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None


def parse_so_args(value: object, vocab_size: int) -> SoArgs:
    """Check ``so_args``.

    Args:
        value: a mapping, or its JSON text.
        vocab_size: ids run from 0 to ``vocab_size - 1``.

    Raises:
        ValueError: a field breaks its rule; the text names it.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(_text("value", f"no JSON ({error})", "an object")) from None
    if not isinstance(value, Mapping):
        raise ValueError(_text("value", type(value).__name__, "an object, or its JSON text"))
    unknown = sorted(str(key) for key in value if key not in KEYS)
    if unknown:
        raise ValueError(_text(f"key {unknown[0]!r}", "unknown", f"one of {', '.join(KEYS)}"))
    kind, schema = value.get("schema_type"), value.get("schema")
    if kind not in FIELD_OF_TYPE:
        raise ValueError(_text("schema_type", repr(kind), f"one of {', '.join(FIELD_OF_TYPE)}"))
    if kind == "json" and isinstance(schema, Mapping | bool):
        schema = json.dumps(schema)
    if not isinstance(schema, str) or not schema:
        raise ValueError(_text("schema", type(schema).__name__, "a text that is not empty"))
    trigger = _trigger(value.get("trigger_token_ids"), vocab_size)
    bound = value.get("bound_token_id")
    if bound is not None:
        if not trigger:
            raise ValueError(_text("bound_token_id", f"{bound!r} without a trigger", "trigger_token_ids beside it"))
        _require_id("bound_token_id", bound, vocab_size)
    return SoArgs(schema_type=kind, schema=schema, trigger_token_ids=trigger, bound_token_id=bound)


def settle_structured_output(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Replace ``so_args`` by vLLM's parameter.

    Args:
        params: the caller's; not changed.
        vocab_size: of the model.

    Returns:
        ``params`` itself where it has no ``so_args``, else a copy without them.

    Raises:
        VLLMValidationError: ``so_args`` is malformed, or stands beside ``structured_outputs``.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    extra: dict[str, Any] = params.extra_args or {}
    if TRIGGER_ARG in extra or BOUND_ARG in extra:
        raise VLLMValidationError(_text(TRIGGER_ARG, "set", "trigger_token_ids in so_args"), parameter=EXTRA_ARG)
    if EXTRA_ARG not in extra:
        return params
    try:
        found = parse_so_args(extra[EXTRA_ARG], vocab_size)
        if params.structured_outputs is not None:
            raise ValueError(_text("structured_outputs", "set as well", "one of the two"))
        settled = copy(params)
        settled.structured_outputs = StructuredOutputsParams(**{FIELD_OF_TYPE[found.schema_type]: found.schema})
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=EXTRA_ARG) from None
    rest = {key: value for key, value in extra.items() if key != EXTRA_ARG}
    rest[TRIGGER_ARG] = list(found.trigger_token_ids)  # empty: from the first token on
    if found.bound_token_id is not None:
        rest[BOUND_ARG] = found.bound_token_id
    settled.extra_args = rest
    return settled


def _trigger(value: object, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TRIGGER:
        raise ValueError(_text("trigger_token_ids", _short(value), f"a list of 1 to {MAX_TRIGGER} token ids"))
    for token in value:
        _require_id("trigger_token_ids", token, vocab_size)
    return tuple(value)


def _require_id(name: str, token: object, vocab_size: int) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError(_text(name, _short(token), f"token ids from 0 to {vocab_size - 1}"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(name: str, found: str, expected: str) -> str:
    return f"so_args: {name} is {found}, expected {expected}; correct the request"
