"""The counts of scheduled verification as series of ``/metrics``."""

from __future__ import annotations

from dataclasses import asdict

from deepinfer_plugin.metrics import PREFIX, Metric
from deepinfer_plugin.speculative import schedule

_NAMES = {
    "steps": (f"{PREFIX}schedule_steps_total", "steps whose drafts were chosen from"),
    "cut_steps": (f"{PREFIX}schedule_cut_steps_total", "steps that left a draft unverified"),
    "left_out": (f"{PREFIX}schedule_left_out_drafts_total", "drafts that were not worth their row"),
    "waited_s": (f"{PREFIX}schedule_wait_seconds_total", "seconds in which the host waited for confidences"),
}

SERIES: tuple[Metric, ...] = tuple(Metric(name=name, kind="counter", meaning=text) for name, text in _NAMES.values())


def figures() -> dict[str, float]:
    """The values of ``SERIES`` in this process."""
    counts = asdict(schedule.FIGURES)
    return {name: counts[field] for field, (name, _) in _NAMES.items()}
