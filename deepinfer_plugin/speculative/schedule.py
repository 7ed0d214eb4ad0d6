"""Which drafts a step verifies, decided on the host in front of the model runner.

The scheduler hands out all drafts; the runner gets a copy of its plan in which each request has only its first ones. To
the scheduler those left out look like rejected ones: it takes back whatever was not generated. Device and host so agree
on every length, and nothing behind the copy knows that there was a choice.

The confidences of a step's drafts are made on the device at the end of the step before. They are copied to the host
behind that step, and waited for in front of the next: with asynchronous scheduling that ends the overlap of one step
with the preparation of the next one, which is the price of deciding on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from deepinfer_plugin.speculative.budget import verified_lengths
from deepinfer_plugin.speculative.step_time import Learned, StepTimeCurve

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """What a rule chooses from.

    Attributes:
        confidence: [num_with_drafts, max_drafts] fp32.
        num_drafts: [num_with_drafts] int64, drafts of each request that has any.
        num_reqs: requests of the step.
        num_sampling: requests that get a token in any case.
        num_other_rows: rows that are no drafts.
    """

    confidence: NDArray[np.float32]
    num_drafts: NDArray[np.int64]
    num_reqs: int
    num_sampling: int
    num_other_rows: int


class LengthRule(Protocol):
    """Chooses how many drafts each request verifies, 0 to ``num_drafts``; every rank must choose alike."""

    def lengths(self, step: StepDrafts) -> NDArray[np.int64]:
        """[num_with_drafts]."""
        ...


class RandomLengths:
    """From none to all, for tests: anything may be chosen."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def lengths(self, step: StepDrafts) -> NDArray[np.int64]:
        """See ``LengthRule``."""
        return self._generator.integers(0, step.num_drafts + 1)


class NoLengths:
    """No draft is ever verified, for tests."""

    def lengths(self, step: StepDrafts) -> NDArray[np.int64]:
        """See ``LengthRule``."""
        return np.zeros_like(step.num_drafts)


@dataclass(slots=True, kw_only=True)
class ByConfidence:
    """The budget rule with the times of a curve and what was learned since."""

    curve: StepTimeCurve
    learned: Learned = Learned()  # noqa: RUF009, frozen

    def lengths(self, step: StepDrafts) -> NDArray[np.int64]:
        """See ``LengthRule``."""
        most = step.num_other_rows + int(step.num_drafts.sum())
        times = self.learned.times(self.curve, step.num_reqs, most)
        return verified_lengths(step.confidence, step.num_drafts, step.num_other_rows, step.num_sampling, times)


class Confidences:
    """The confidences of every request's latest drafts, on their way from the device and on the host."""

    def __init__(self, max_num_reqs: int, num_drafts: int, device: torch.device) -> None:
        import torch

        self.num_drafts = num_drafts
        is_pinned = device.type == "cuda"
        self._buffer = torch.ones(max_num_reqs, num_drafts, dtype=torch.float32, pin_memory=is_pinned)
        self._arrived = torch.cuda.Event(blocking=True) if is_pinned else None  # type: ignore[no-untyped-call]
        self._sent: tuple[str, ...] = ()
        self._known: dict[str, NDArray[np.float32]] = {}

    def send(self, requests: Sequence[str], confidence: torch.Tensor) -> None:
        """Start the copy.

        Args:
            requests: ids of the step that has made the drafts, in order.
            confidence: [at least as many rows, num_drafts] fp32, on the device.
        """
        count = len(requests)
        self._buffer[:count].copy_(confidence[:count], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._sent = tuple(requests)

    def receive(self) -> None:
        """Wait for what was sent last."""
        if self._arrived is not None and self._sent:
            self._arrived.synchronize()
        rows = self._buffer.numpy()[: len(self._sent)].copy()
        self._known.update(zip(self._sent, rows, strict=True))
        self._sent = ()

    def forget(self, requests: Iterable[str]) -> None:
        """Drop requests that are gone, or begin again."""
        for request in requests:
            self._known.pop(request, None)

    def of(self, requests: Sequence[str]) -> NDArray[np.float32]:
        """[len(requests), num_drafts] fp32; 0 for a request that nothing was drafted for: what it has are paddings."""
        none = np.zeros(self.num_drafts, dtype=np.float32)
        found = [self._known.get(request, none) for request in requests]
        return np.stack(found) if found else np.zeros((0, self.num_drafts), dtype=np.float32)


@dataclass(slots=True)
class ScheduleFigures:
    """Counts of this process.

    Attributes:
        steps: steps whose drafts were chosen from.
        cut_steps: of these, steps that left a draft out.
        left_out: drafts that were not verified.
        waited_s: seconds in which the host waited for the device.
    """

    steps: int = 0
    cut_steps: int = 0
    left_out: int = 0
    waited_s: float = 0.0


FIGURES = ScheduleFigures()


def cut_output(output: SchedulerOutput, kept: Mapping[str, int]) -> SchedulerOutput:
    """A copy in which requests verify no more than their first drafts; the scheduler keeps its own.

    Args:
        output: plan of a step.
        kept: drafts that stay, of every request that has any.
    """
    drafts, tokens = dict(output.scheduled_spec_decode_tokens), dict(output.num_scheduled_tokens)
    for request, count in kept.items():
        tokens[request] -= len(drafts[request]) - count
        drafts[request] = drafts[request][:count]
        if count == 0:
            del drafts[request]  # the runner takes a request that it finds here for one with drafts
    return replace(
        output,
        scheduled_spec_decode_tokens=drafts,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


class VerificationSchedule:
    """Cuts the plan of each step by a rule."""

    def __init__(self, rule: LengthRule, confidences: Confidences) -> None:
        self.rule, self.confidences = rule, confidences

    def cut(self, output: SchedulerOutput, prompt_length: Callable[[str], int]) -> SchedulerOutput:
        """The plan as the runner shall see it.

        Args:
            output: plan of a step.
            prompt_length: of a request that the runner knows, the tokens that it computes before it draws.
        """
        start_s = time.monotonic()
        self.confidences.receive()
        FIGURES.waited_s += time.monotonic() - start_s
        self.confidences.forget(output.finished_req_ids)
        self.confidences.forget(output.preempted_req_ids or ())
        self.confidences.forget(request.req_id for request in output.scheduled_new_reqs)
        drafts = output.scheduled_spec_decode_tokens
        requests = [request for request, tokens in drafts.items() if tokens]
        if not requests:
            return output
        step = StepDrafts(
            confidence=self.confidences.of(requests),
            num_drafts=np.array([len(drafts[request]) for request in requests], dtype=np.int64),
            num_reqs=len(output.num_scheduled_tokens),
            num_sampling=_num_sampling(output, prompt_length),
            num_other_rows=output.total_num_scheduled_tokens - sum(len(drafts[request]) for request in requests),
        )
        lengths = self.rule.lengths(step)
        num_left_out = int((step.num_drafts - lengths).sum())
        FIGURES.steps += 1
        FIGURES.cut_steps += num_left_out > 0
        FIGURES.left_out += num_left_out
        return cut_output(output, dict(zip(requests, lengths.tolist(), strict=True))) if num_left_out else output


def _num_sampling(output: SchedulerOutput, prompt_length: Callable[[str], int]) -> int:
    """Requests of a step that get a token: all but those whose prompt goes on."""
    tokens, drafts, cached = (
        output.num_scheduled_tokens,
        output.scheduled_spec_decode_tokens,
        output.scheduled_cached_reqs,
    )
    ends = {
        request.req_id: (request.num_computed_tokens, len(request.prefill_token_ids or ()))
        for request in output.scheduled_new_reqs
    }
    for request, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        ends[request] = (num_computed, prompt_length(request))
    return sum(
        ends[request][0] + count - len(drafts.get(request, ())) >= ends[request][1] for request, count in tokens.items()
    )
