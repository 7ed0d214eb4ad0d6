"""Grammars that start in the middle of an answer: after an exact sequence of token ids, or at a bound token.

Until the trigger sequence has been produced every token is allowed; an occurrence may overlap an earlier beginning of
one, as in a text search. The bound token cuts the free text short: what is missing of the sequence from there on is
forced, token by token. Then the grammar applies. An answer may end before any of it.

vLLM's own way to start later is its reasoning parser, which knows one end of reasoning per model. A request with
``so_args`` is not gated by it: the reasoning is part of the free text, or of the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from deepinfer_plugin.grammar.so_args import BOUND_ARG, TRIGGER_ARG
from deepinfer_plugin.wrapping import wrap

if TYPE_CHECKING:
    import torch

WORD_BITS = 32  # of a bitmask: one int32 for 32 token ids


@dataclass(frozen=True, slots=True)
class _State:
    """``matched`` ids of the trigger are there; ``is_forced``: the rest follows. All matched: the grammar applies."""

    matched: int = 0
    is_forced: bool = False


class TriggeredGrammar(StructuredOutputGrammar):
    """A grammar behind a trigger; see the module. Holds one state per token, so that drafts can be taken back."""

    def __init__(self, inner: StructuredOutputGrammar, trigger: Sequence[int], bound: int | None) -> None:
        self._inner = inner
        self._trigger = tuple(trigger)
        self._bound = bound
        self._borders = _borders(self._trigger)
        self._states = [_State()]  # one more than accepted tokens

    @property
    def is_started(self) -> bool:
        """Whether the grammar applies."""
        return self._states[-1].matched == len(self._trigger)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance by produced tokens; False where one breaks the forced sequence or the grammar."""
        for token in tokens:
            state = self._next(request_id, token)
            if state is None:
                return False
            self._states.append(state)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest prefix of ``tokens`` that may follow; nothing is advanced."""
        accepted: list[int] = []
        for token in tokens:
            may_follow = bool(self._inner.validate_tokens([token])) if self.is_started else True
            state = self._next("", token) if may_follow else None
            if state is None:
                break
            self._states.append(state)
            accepted.append(token)
        self.rollback(len(accepted))
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens."""
        if num_tokens == 0:
            return
        start = len(self._states) - num_tokens
        # a token was the grammar's if the grammar already applied before it
        of_grammar = sum(state.matched == len(self._trigger) for state in self._states[start - 1 : -1])
        del self._states[start:]
        if of_grammar:
            self._inner.rollback(of_grammar)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Allow every token, the forced one, or what the grammar allows.

        Args:
            bitmask: [num_rows, ceil(vocab_size / 32)] int32.
            batch_index: the row to fill.
        """
        state = self._states[-1]
        if self.is_started:
            self._inner.fill_bitmask(bitmask, batch_index)
            return
        row = bitmask[batch_index]
        row.fill_(0 if state.is_forced else -1)
        if state.is_forced:
            word, bit = divmod(self._trigger[state.matched], WORD_BITS)
            row.numpy().view(np.uint32)[word] = np.uint32(1 << bit)

    def is_terminated(self) -> bool:
        """Whether the grammar has accepted its last token."""
        return self.is_started and self._inner.is_terminated()

    def reset(self) -> None:
        """Back to the start of the answer."""
        self._inner.reset()
        self._states = [_State()]

    def _next(self, request_id: str, token: int) -> _State | None:
        state = self._states[-1]
        if self.is_started:
            return state if self._inner.accept_tokens(request_id, [token]) else None
        if state.is_forced:
            return _State(state.matched + 1, True) if token == self._trigger[state.matched] else None
        matched = self._match(state.matched, token)
        return _State(matched, token == self._bound)

    def _match(self, matched: int, token: int) -> int:
        """Length of the longest beginning of the trigger that the text ends with after ``token``."""
        while matched > 0 and token != self._trigger[matched]:
            matched = self._borders[matched - 1]
        return matched + 1 if token == self._trigger[matched] else 0


def _borders(sequence: Sequence[int]) -> list[int]:
    """For each beginning of a sequence the length of its longest proper beginning that is also its end."""
    borders = [0] * len(sequence)
    length = 0
    for index in range(1, len(sequence)):
        while length > 0 and sequence[index] != sequence[length]:
            length = borders[length - 1]
        length += sequence[index] == sequence[length]
        borders[index] = length
    return borders


def install() -> None:
    """Let vLLM's engine put a request's grammar behind its trigger, see ``compat.PATCHES``.

    Raises:
        PlatformError: the method is not the one this version knows.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    wrap(StructuredOutputManager, "_create_grammar", ("self", "request"), _create_grammar)


def _create_grammar(original: Callable[..., Any], self: Any, request: Any) -> Any:
    grammar = original(self, request)
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    trigger = extra.get(TRIGGER_ARG)
    if trigger is None:
        return grammar
    request.structured_output_request.reasoning_ended = True  # the reasoning is part of the free text
    return TriggeredGrammar(grammar, trigger, extra.get(BOUND_ARG)) if trigger else grammar
