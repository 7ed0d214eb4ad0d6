"""Injected drafters and verification lengths: drafts that are always right, always wrong, impossible, or made of NaN.

The drafters stand in the place of ``propose`` of the engine's own speculator, so everything behind it is the engine's.
``right``, ``partly`` and ``systematic`` know the answers that earlier engines of the same plan gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from deepinfer_plugin.speculative.record import DraftRecord
    from deepinfer_plugin.speculative.schedule import LengthRule

DRAFTERS = ("right", "wrong", "partly", "systematic", "nan", "outside", "random")
LENGTHS = ("random", "none", "confidence")
PERIOD = 32  # positions after which ``systematic`` counts anew: a page of tests, and a multiple of 2 and 8
_STEP_S, _ROW_S = 20.0, 1.0  # time of a step of one row, and what another one adds
_SHIFT = 7  # of a wrong draft against the right one, in ids


@dataclass(slots=True)
class Answers:
    """Prompts with their answers, as far as engines have given them; found by their first tokens."""

    known: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember one."""
        self.known.append((*prompt, *answer))

    def after(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens after ``tokens``; -1 where no answer goes so far."""
        start = tuple(tokens)
        found: tuple[int, ...] = max(
            (known for known in self.known if known[: len(start)] == start), key=len, default=()
        )
        following = list(found[len(start) : len(start) + count])
        return following + [-1] * (count - len(following))


class InjectedDrafter:
    """Drafts of one kind for every request of a step."""

    def __init__(self, kind: str, req_states: Any, num_drafts: int, vocab_size: int, answers: Answers) -> None:
        import torch

        assert kind in DRAFTERS, f"drafter: kind is {kind!r}, expected one of {DRAFTERS}"
        self._kind, self._states, self._count, self._vocab = kind, req_states, num_drafts, vocab_size
        self._answers = answers
        self._random = np.random.default_rng(0)
        self._num_tried = np.zeros((PERIOD, num_drafts + 1), dtype=np.int64)  # by position and right drafts
        self._device = req_states.all_token_ids.gpu.device
        self.record: DraftRecord | None = None  # where confidences are kept
        self.draft_token_confidence_probs = torch.ones(req_states.max_num_reqs, num_drafts, device=self._device)

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """Drafts of the step: [num_reqs, num_drafts] int64."""
        import torch

        del args, kwargs
        drafts = torch.zeros(input_batch.num_reqs, self._count, dtype=torch.int64)
        confidence = torch.zeros(input_batch.num_reqs, self._count, dtype=torch.float32)
        if not dummy_run:
            for row, slot in enumerate(input_batch.idx_mapping.tolist()):
                drafts[row] = torch.tensor(self._drafts(slot), dtype=torch.int64)
                length = int(self._states.total_len.gpu[slot])
                confidence[row] = said_confidence(self._states.all_token_ids.gpu[slot, :length].tolist(), self._count)
            confidence = confidence.to(self._device)
            self.draft_token_confidence_probs[: input_batch.num_reqs] = confidence
            if self.record is not None:
                self.record.store_confidence(input_batch.idx_mapping, confidence)
        return drafts.to(self._device)

    def _drafts(self, slot: int) -> list[int]:
        import torch

        if self._kind == "nan":
            logits = torch.full((self._count, self._vocab), torch.nan)
            found: list[int] = logits.argmax(dim=1).tolist()
            return found
        if self._kind == "outside":
            choices = (-1, -(2**31), self._vocab, self._vocab + 5, 2**31 - 1)
            return [int(x) for x in self._random.choice(choices, self._count)]
        if self._kind == "random":
            return [int(x) for x in self._random.integers(0, self._vocab, self._count)]
        length = int(self._states.total_len.gpu[slot])
        right = self._answers.after(self._states.all_token_ids.gpu[slot, :length].tolist(), self._count)
        if self._kind == "right":
            return right
        num_right = 0
        if self._kind == "partly":
            num_right = _drawn(self._states.all_token_ids.gpu[slot, :length], self._count)
        elif self._kind == "systematic":
            num_right = self._rarest(length)
        return right[:num_right] + [(token + _SHIFT) % self._vocab for token in right[num_right:]]

    def _rarest(self, length: int) -> int:
        """The number of right drafts that was tried least where a request has as many tokens, modulo ``PERIOD``."""
        tried = self._num_tried[length % PERIOD]
        chosen = int(tried.argmin())
        tried[chosen] += 1
        return chosen


def _drawn(tokens: torch.Tensor, largest: int) -> int:
    """0 to ``largest``, a function of the tokens: when a step comes, and what else it holds, changes nothing."""
    return int(np.random.default_rng(tokens.tolist()).integers(0, largest + 1))


def said_confidence(tokens: Sequence[int], count: int) -> torch.Tensor:
    """What an injected drafter says of its drafts behind ``tokens``, prompt and answer so far: [count] fp32.

    It is a function of the tokens, so that a test knows it of every step.
    """
    import torch

    return torch.from_numpy(np.random.default_rng([1, *tokens]).random(count, dtype=np.float32))


def inject(engine: Any, kind: str, answers: Answers) -> None:
    """Put a drafter in the place of that of an engine of this process."""
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = InjectedDrafter(kind, runner.req_states, runner.num_speculative_steps, runner.vocab_size, answers)
    drafter.record = runner.sampler.drafts
    runner.speculator.propose = drafter.propose
    runner.speculator.draft_token_confidence_probs = drafter.draft_token_confidence_probs


def choose_lengths(engine: Any, kind: str) -> None:
    """Let the worker of an engine of this process verify as many drafts of each request as a rule says.

    Args:
        engine: with drafts.
        kind: ``random`` lengths from none to all, ``none``, or ``confidence``: the budget rule on a curve of this file,
            so that lengths follow from confidences and not from how fast this machine is.
    """
    from deepinfer_plugin.speculative.schedule import ByConfidence, NoLengths, RandomLengths
    from deepinfer_plugin.speculative.step_time import StepTimeCurve

    assert kind in LENGTHS, f"drafts: lengths are {kind!r}, expected one of {LENGTHS}"
    rules: Mapping[str, Callable[[], LengthRule]] = {
        "random": lambda: RandomLengths(seed=1),
        "none": NoLengths,
        "confidence": lambda: ByConfidence(
            curve=StepTimeCurve(rows=(1, 100), times_s=(_STEP_S, _STEP_S + 99 * _ROW_S))
        ),
    }
    engine.engine_core.engine_core.model_executor.driver_worker.worker.choose_lengths(rules[kind]())
