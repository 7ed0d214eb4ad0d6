"""How long a step takes by its rows: a curve measured at start, and what real steps add to it. No engine, no clock.

Time of a step = curve at its padded rows + slope x padded rows + time behind the forward pass. The slope stands for
what the dummy steps at start do not have, long contexts above all; the last term for logits, draws and the next drafts.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_plugin.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Numbers of samples as DeepInfer has them (spec §4.7).
NUM_STEPS = 5000  # steps that are remembered
MIN_OF_A_SIZE = 10  # samples of a size before its median counts for the slope
NUM_RECENT = 9  # times behind the forward pass whose median is taken, at one number of requests
MIN_RECENT = 5  # of them, before those of all numbers of requests stand in


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeCurve:
    """Measured times of forward passes.

    Attributes:
        rows: rows of the measured steps, ascending.
        times_s: their times in seconds.
        largest_graph: up to so many rows a step is padded to the next of ``rows``; 0: steps are not padded.

    Raises:
        InputError: sizes and times are not of one number, none, not ascending, or not positive and finite.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]
    largest_graph: int = 0

    def __post_init__(self) -> None:
        is_ascending = all(low < high for low, high in zip((0, *self.rows), self.rows, strict=False))
        is_timed = all(math.isfinite(time_s) and time_s > 0 for time_s in self.times_s)
        if not (self.rows and len(self.rows) == len(self.times_s) and is_ascending and is_timed):
            raise InputError(
                f"step times: rows are {self.rows} with times {self.times_s}, expected ascending positive rows and a "
                "positive time for each; measure them again"
            )

    def padded(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """The rows that steps of so many rows compute."""
        sizes = np.array(self.rows, dtype=np.int64)
        following = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        return np.where(rows <= self.largest_graph, following, rows).astype(np.int64)

    def group(self, rows: int) -> int:
        """The measured size that a step counts with: the next one, or the last."""
        return next((size for size in self.rows if size >= rows), self.rows[-1])

    def times(self, max_rows: int) -> NDArray[np.float64]:
        """[max_rows + 1] fp64 seconds by rows, never falling: steps of graphs, then straight lines between sizes.

        Beyond the last size the last line goes on.
        """
        sizes = np.array(self.rows, dtype=np.float64)
        measured = np.maximum.accumulate(np.array(self.times_s, dtype=np.float64))
        rows = np.arange(max_rows + 1)
        found: NDArray[np.float64] = np.interp(self.padded(rows), sizes, measured)
        if self.largest_graph:
            # the first size without a graph: nothing between it and the last graph is known to be cheaper
            above = sizes > self.largest_graph
            is_eager = rows > self.largest_graph
            if above.any():
                found[is_eager] = np.interp(rows[is_eager], sizes[above], measured[above])
        if len(sizes) > 1:
            slope = (measured[-1] - measured[-2]) / (sizes[-1] - sizes[-2])
            found += np.maximum(rows - sizes[-1], 0.0) * slope
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What real steps have shown.

    Attributes:
        slope_s: seconds a padded row, not negative.
        behind_s: seconds behind the forward pass by number of requests.
        behind_any_s: the same for other numbers of requests.
    """

    slope_s: float = 0.0
    behind_s: Mapping[int, float] = field(default_factory=dict)
    behind_any_s: float = 0.0

    def times(self, curve: StepTimeCurve, num_reqs: int, max_rows: int) -> NDArray[np.float64]:
        """[max_rows + 1] fp64 seconds of a step of ``num_reqs`` requests, by its rows."""
        rows = curve.padded(np.arange(max_rows + 1))
        return curve.times(max_rows) + self.slope_s * rows + self.behind_s.get(num_reqs, self.behind_any_s)


class StepTimeLearner:
    """Remembers times of real steps."""

    def __init__(self, curve: StepTimeCurve) -> None:
        self._curve = curve
        self._expected = curve.times(curve.rows[-1])
        self._over: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._behind: deque[float] = deque(maxlen=NUM_STEPS)
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_RECENT))

    def add(self, rows: int, num_reqs: int, forward_s: float, behind_s: float) -> None:
        """Take a step.

        Args:
            rows: of the step, unpadded; one beyond the curve teaches nothing about the slope.
            num_reqs: its requests.
            forward_s: seconds up to the end of its forward pass.
            behind_s: seconds from there to the end of its drafts.
        """
        self._behind.append(behind_s)
        self._recent[num_reqs].append(behind_s)
        if rows < len(self._expected):
            padded = int(self._curve.padded(np.array([rows]))[0])
            self._over.append((self._curve.group(rows), (forward_s - float(self._expected[rows])) / padded))

    def learned(self) -> Learned:
        """What the steps so far show."""
        by_size: defaultdict[int, list[float]] = defaultdict(list)
        for size, over_s in self._over:
            by_size[size].append(over_s)
        medians = [median(over) for over in by_size.values() if len(over) >= MIN_OF_A_SIZE]
        return Learned(
            slope_s=max(0.0, median(medians)) if medians else 0.0,
            behind_s={count: median(times) for count, times in self._recent.items() if len(times) >= MIN_RECENT},
            behind_any_s=median(self._behind) if self._behind else 0.0,
        )


def profile_sizes(graph_sizes: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Rows to measure at start: every graph, and powers of two between the largest and the longest step.

    Args:
        graph_sizes: rows of captured graphs; empty where there are none.
        max_rows: most rows of a step.
    """
    largest = max(graph_sizes, default=0)
    beyond = {2**power for power in range(max_rows.bit_length())} | {max_rows}
    if 0 < largest < max_rows:
        beyond.add(largest + 1)  # the first step without a graph
    return tuple(sorted({*graph_sizes, *(rows for rows in beyond if rows > largest)}))
