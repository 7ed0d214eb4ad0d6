"""DeepInfer's extra parameters of a request, in ``extra_args`` (``vllm_xargs`` of the server).

Importing it loads neither torch nor vLLM. ``server_defaults`` has what a server adds to every request.

* ``force_top_k``: 1 or more. Every token is drawn among this many largest logits; what follows (temperature, min-p,
  top-k, top-p) sees only these.
* ``token_blacklist``: ids that are never produced: a list of ids and texts ``first-last``, or one text of both
  separated by commas.
* ``golden_token_ids``: the first tokens of the answer, whatever the model would say. Log-probabilities (raw ones,
  vLLM's default) are those of the model: a fixed text can be scored.
* ``context_cap``: most tokens of prompt and answer together.
* ``sum_smaller_probs``: true. Each token comes with the probability mass of itself, of all less likely tokens and of
  equally likely ones of a lower id.
* ``draft_facts``: true. The answer says of every step what became of its drafts, see ``speculative.facts``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

FORCE_TOP_K = "force_top_k"
TOKEN_BLACKLIST = "token_blacklist"
GOLDEN_TOKENS = "golden_token_ids"
CONTEXT_CAP = "context_cap"
SUM_SMALLER = "sum_smaller_probs"
DRAFT_FACTS = "draft_facts"
NAMES = (FORCE_TOP_K, TOKEN_BLACKLIST, GOLDEN_TOKENS, CONTEXT_CAP, SUM_SMALLER, DRAFT_FACTS)
_RANGE = re.compile(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Checked parameters. ``token_blacklist`` holds ranges, first and last included."""

    force_top_k: int | None = None
    token_blacklist: tuple[tuple[int, int], ...] = ()
    golden_token_ids: tuple[int, ...] = ()
    context_cap: int | None = None
    sum_smaller_probs: bool = False
    draft_facts: bool = False

    @classmethod
    def from_extra_args(cls, extra: Mapping[str, Any] | None, vocab_size: int) -> Extras:
        """Read and check the parameters of a request; others in ``extra`` are left alone.

        Args:
            extra: ``extra_args`` of the request.
            vocab_size: ids run from 0 to ``vocab_size - 1``.

        Raises:
            ValueError: a parameter breaks its rule; the text names it.
        """
        extra = extra or {}
        return cls(
            force_top_k=_count(extra, FORCE_TOP_K, vocab_size),
            token_blacklist=_ranges(extra.get(TOKEN_BLACKLIST), vocab_size),
            golden_token_ids=_ids(extra.get(GOLDEN_TOKENS), vocab_size),
            context_cap=_count(extra, CONTEXT_CAP, None),
            sum_smaller_probs=_flag(extra, SUM_SMALLER),
            draft_facts=_flag(extra, DRAFT_FACTS),
        )

    def with_defaults(self, extra: Mapping[str, Any] | None, defaults: Extras) -> Extras:
        """What the request says, and else what the server says; tokens that either of them bans are banned.

        Args:
            extra: ``extra_args`` that these parameters were read from.
            defaults: those of the server; its golden tokens and its context cap do not exist.
        """
        says_sums = (extra or {}).get(SUM_SMALLER) is not None
        return replace(
            self,
            force_top_k=defaults.force_top_k if self.force_top_k is None else self.force_top_k,
            token_blacklist=(*self.token_blacklist, *defaults.token_blacklist),
            sum_smaller_probs=self.sum_smaller_probs if says_sums else defaults.sum_smaller_probs,
        )


NOTHING = Extras()


def settle_extras(params: SamplingParams, vocab_size: int, defaults: Extras = NOTHING) -> tuple[SamplingParams, Extras]:
    """Check a request's parameters against each other and bring them into one form for the worker.

    Args:
        params: the caller's; not changed.
        vocab_size: of the model.
        defaults: of the server, in force where the request does not say otherwise.

    Returns:
        ``params`` itself where neither has any of them, else a copy; and the parameters.

    Raises:
        VLLMValidationError: a parameter breaks its rule, or two contradict each other.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        own = Extras.from_extra_args(params.extra_args, vocab_size)
        extras = own.with_defaults(params.extra_args, defaults)
        _check_together(extras, params, vocab_size, defaults)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from None
    if extras == NOTHING:
        return params, extras
    settled = copy(params)
    settled.extra_args = {
        **{key: value for key, value in (params.extra_args or {}).items() if key not in NAMES},
        **worker_args(extras),
    } or None
    if (extras.sum_smaller_probs or extras.draft_facts) and settled.logprobs is None:
        settled.logprobs = 0  # sums and facts travel with the log-probabilities
    return settled, extras


def worker_args(extras: Extras) -> dict[str, Any]:
    """What the worker's part of the sampler reads, in the form in which it reads it."""
    found: dict[str, Any] = {}
    if extras.force_top_k is not None:
        found[FORCE_TOP_K] = extras.force_top_k
    if extras.token_blacklist:
        found[TOKEN_BLACKLIST] = [list(pair) for pair in extras.token_blacklist]
    if extras.golden_token_ids:
        found[GOLDEN_TOKENS] = list(extras.golden_token_ids)
    if extras.sum_smaller_probs:
        found[SUM_SMALLER] = True
    if extras.draft_facts:
        found[DRAFT_FACTS] = True
    return found


def capped_max_tokens(extras: Extras, num_prompt_tokens: int, max_tokens: int) -> int:
    """``max_tokens`` under the context cap.

    Raises:
        VLLMValidationError: the prompt leaves no room for a token.
    """
    from vllm.exceptions import VLLMValidationError

    if extras.context_cap is None:
        return max_tokens
    room = extras.context_cap - num_prompt_tokens
    if room < 1:
        text = _text(
            CONTEXT_CAP, f"{extras.context_cap} with a prompt of {num_prompt_tokens} tokens", "a larger number"
        )
        raise VLLMValidationError(text, parameter="extra_args")
    return min(max_tokens, room)


def _check_together(extras: Extras, params: SamplingParams, vocab_size: int, defaults: Extras) -> None:
    name = TOKEN_BLACKLIST if not defaults.token_blacklist else f"{TOKEN_BLACKLIST} with that of the server"
    banned = {token for first, last in extras.token_blacklist for token in range(first, last + 1)}
    if len(banned) >= vocab_size:
        raise ValueError(_text(name, "the whole vocabulary", "at least one token outside"))
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise ValueError(_text(name, "all of allowed_token_ids", "at least one token outside"))
    blocked = sorted(banned.intersection(extras.golden_token_ids))
    if blocked:
        raise ValueError(_text(GOLDEN_TOKENS, f"with {blocked[0]}, which is in {name}", "no such token"))
    if extras.golden_token_ids and params.structured_outputs is not None:
        raise ValueError(_text(GOLDEN_TOKENS, "set with structured output", "one of the two"))
    for name, is_set in ((SUM_SMALLER, extras.sum_smaller_probs), (DRAFT_FACTS, extras.draft_facts)):
        if is_set and params.n != 1:
            raise ValueError(_text(name, f"set with n {params.n}", "n 1"))


def _count(extra: Mapping[str, Any], name: str, high: int | None) -> int | None:
    value = extra.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (high is not None and value > high):
        bounds = "1 or more" if high is None else f"from 1 to {high}"
        raise ValueError(_text(name, _short(value), f"an integer {bounds}"))
    return value


def _flag(extra: Mapping[str, Any], name: str) -> bool:
    value = extra.get(name)
    if value is None:
        return False
    if value not in (0, 1):
        raise ValueError(_text(name, _short(value), "true or false (1 or 0)"))
    return bool(value)


def _ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or any(not _is_id(token, vocab_size) for token in value):
        raise ValueError(_text(GOLDEN_TOKENS, _short(value), f"a list of token ids from 0 to {vocab_size - 1}"))
    return tuple(value)


def _ranges(value: object, vocab_size: int) -> tuple[tuple[int, int], ...]:
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) and value.strip() else value
    if not isinstance(parts, list) or not parts:
        raise ValueError(_text(TOKEN_BLACKLIST, _short(value), "ids and ranges first-last, as a list or a text"))
    return tuple(_range(part, vocab_size) for part in parts)


def _range(part: object, vocab_size: int) -> tuple[int, int]:
    pair: list[object] = [part, part]
    if isinstance(part, str) and (found := _RANGE.fullmatch(part)) is not None:
        pair = [int(found[1]), int(found[2] or found[1])]
    elif isinstance(part, list):
        pair = part
    ids = [token for token in pair if isinstance(token, int) and _is_id(token, vocab_size)]
    if len(pair) != 2 or len(ids) != 2 or ids[0] > ids[1]:
        rule = f"an id, or first-last, from 0 to {vocab_size - 1}"
        raise ValueError(_text(TOKEN_BLACKLIST, f"with {_short(part)}", rule))
    return ids[0], ids[1]


def _is_id(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(name: str, found: str, expected: str) -> str:
    return f"sampling: {name} is {found}, expected {expected}; correct it or leave it out"
