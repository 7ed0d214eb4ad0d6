"""Drafts as series of ``/metrics``: counters, and what they say of the last interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfer_plugin.metrics import PREFIX, Metric, Values
from deepinfer_plugin.speculative.counters import VERIFICATION, Figures, Verification

_ENGINE = ("engine",)
_PLACE = ("engine", "position")  # position 0 is the first draft of a step

STEPS = Metric(
    name=f"{PREFIX}draft_steps_total", kind="counter", meaning="steps of requests that had drafts", labels=_ENGINE
)
DRAFTED = Metric(
    name=f"{PREFIX}drafts_drafted_total", kind="counter", meaning="drafts that steps had, by position", labels=_PLACE
)
VERIFIED = Metric(
    name=f"{PREFIX}drafts_verified_total",
    kind="counter",
    meaning="drafts that passed the model, by position",
    labels=_PLACE,
)
ACCEPTED = Metric(
    name=f"{PREFIX}drafts_accepted_total", kind="counter", meaning="drafts that stand, by position", labels=_PLACE
)
ACCEPTANCE = Metric(
    name=f"{PREFIX}draft_acceptance_ratio",
    kind="gauge",
    meaning="accepted drafts over verified ones of the same position, over the last interval",
    labels=_PLACE,
)
VERIFIED_LENGTH = Metric(
    name=f"{PREFIX}draft_verified_length_tokens",
    kind="gauge",
    meaning="mean of 1 + verified drafts of a request in a step, over the last interval",
    labels=_ENGINE,
)
ACCEPTED_LENGTH = Metric(
    name=f"{PREFIX}draft_accepted_length_tokens",
    kind="gauge",
    meaning="mean of 1 + accepted drafts of a request in a step, over the last interval",
    labels=_ENGINE,
)
CONFIDENCE_ERROR = Metric(
    name=f"{PREFIX}draft_confidence_error_ratio",
    kind="gauge",
    meaning="mean |confidence - accepted| of verified drafts with all before them accepted, over the last interval",
    labels=_PLACE,
)
SERIES = (STEPS, DRAFTED, VERIFIED, ACCEPTED, ACCEPTANCE, VERIFIED_LENGTH, ACCEPTED_LENGTH, CONFIDENCE_ERROR)


class DraftSeries:
    """The values of ``SERIES`` of one engine. An interval lasts from one reading with new drafts to the next."""

    def __init__(self, engine: str, counts: Verification = VERIFICATION) -> None:
        self._engine = engine
        self._counts = counts
        self._begin = Figures()
        self._interval = Figures()

    def figures(self) -> Mapping[str, Values]:
        """Waits for the device."""
        now = self._counts.figures()
        if now.steps < self._begin.steps:
            self._begin = Figures()  # the counters were reset
        if now.steps > self._begin.steps:
            self._begin, self._interval = now, now.since(self._begin)
        of = self._interval
        values: dict[str, Values] = {
            STEPS.name: {(self._engine,): now.steps},
            DRAFTED.name: self._by_place(now.drafted),
            VERIFIED.name: self._by_place(now.verified),
            ACCEPTED.name: self._by_place(now.accepted),
            ACCEPTANCE.name: self._at(of.acceptance),
            CONFIDENCE_ERROR.name: self._at(of.mean_confidence_error),
        }
        if of.verified_length is not None and of.accepted_length is not None:
            values[VERIFIED_LENGTH.name] = {(self._engine,): of.verified_length}
            values[ACCEPTED_LENGTH.name] = {(self._engine,): of.accepted_length}
        return values

    def _by_place(self, counts: Sequence[int]) -> Values:
        return self._at(dict(enumerate(counts)))

    def _at(self, ratios: Mapping[int, float]) -> Values:
        return {(self._engine, str(place)): value for place, value in ratios.items()}
