"""Statistics of a run: intervals over questions, spread between epochs, pass@k, and the paired comparison of two runs.

Questions are the sample, epochs are repeats of one question: an interval over answers would be too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 20260  # of the bootstrap and of the sign flips: a report made twice is the same report
CHUNK = 500  # resamples at a time; bounds the memory
MAX_EXACT = 14  # pairs that differ, up to which every sign pattern is counted

Results = Mapping[str, Mapping[int, bool]]  # question id -> epoch -> right


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Two runs on the questions and epochs that both have.

    Attributes:
        difference: mean over questions of B minus A, with its bootstrap interval.
        p_value: two-sided, of a difference as large under random signs.
        better, worse, equal: questions on which B is better, worse or equal.
    """

    difference: Interval
    p_value: float
    better: int
    worse: int
    equal: int


def question_means(results: Results) -> np.ndarray:
    """Share of right answers of each question with any, [num_questions] fp64, in the order of ``results``."""
    return np.array([sum(epochs.values()) / len(epochs) for epochs in results.values() if epochs], dtype=np.float64)


def bootstrap_mean(values: np.ndarray) -> Interval:
    """Mean of ``values`` [num_questions] and the percentile interval of a bootstrap over them.

    Raises:
        ValueError: there is no value.
    """
    if values.size == 0:
        raise ValueError("bootstrap_mean: there is no value, expected one for each question")
    generator = np.random.Generator(np.random.PCG64(SEED))
    means = np.concatenate([
        values[generator.integers(0, values.size, (CHUNK, values.size))].mean(axis=1)
        for _ in range(RESAMPLES // CHUNK)
    ])  # fmt: skip
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))


def epoch_scores(results: Results) -> dict[int, float]:
    """Score of each epoch over the questions that have it."""
    found: dict[int, list[bool]] = {}
    for epochs in results.values():
        for epoch, is_right in epochs.items():
            found.setdefault(epoch, []).append(is_right)
    return {epoch: sum(rights) / len(rights) for epoch, rights in sorted(found.items())}


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (n - 1); None for fewer than two values."""
    return float(np.std(np.array(values), ddof=1)) if len(values) > 1 else None


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that k answers drawn from these without replacement hold a right one: the unbiased estimate.

    Raises:
        ValueError: not 1 <= k <= num_answers, or more right ones than answers.
    """
    if not 1 <= k <= num_answers or not 0 <= num_right <= num_answers:
        raise ValueError(f"pass_at_k: k is {k} and {num_right} are right, expected both within {num_answers} answers")
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def pass_at_k_of(results: Results, k: int) -> tuple[float, int]:
    """Mean of ``pass_at_k`` over the questions with at least k answers, and how many these are."""
    values = [pass_at_k(len(epochs), sum(epochs.values()), k) for epochs in results.values() if len(epochs) >= k]
    return (sum(values) / len(values) if values else math.nan), len(values)


def paired(first: Results, second: Results) -> Paired:
    """Compare two runs by question, on the samples that both have.

    Raises:
        ValueError: they share no sample.
    """
    differences = []
    for question in sorted(first.keys() & second.keys()):
        shared = first[question].keys() & second[question].keys()
        if shared:
            gain = sum(second[question][epoch] - first[question][epoch] for epoch in shared)
            differences.append(gain / len(shared))
    values = np.array(differences, dtype=np.float64)
    return Paired(
        difference=bootstrap_mean(values),
        p_value=_sign_flip(values),
        better=int((values > 0).sum()),
        worse=int((values < 0).sum()),
        equal=int((values == 0).sum()),
    )


def _sign_flip(values: np.ndarray) -> float:
    """Two-sided p-value of the mean under signs that are as likely plus as minus."""
    moved = values[values != 0]
    if moved.size == 0:
        return 1.0
    if moved.size <= MAX_EXACT:
        patterns = (np.arange(2**moved.size)[:, None] >> np.arange(moved.size)) & 1
        sums = np.abs((1 - 2 * patterns) @ moved)
        return float((sums >= abs(moved.sum()) - 1e-12).mean())
    generator = np.random.Generator(np.random.PCG64(SEED))
    count = 0
    for _ in range(RESAMPLES // CHUNK):
        signs = 1 - 2 * generator.integers(0, 2, (CHUNK, moved.size))
        count += int((np.abs(signs @ moved) >= abs(moved.sum()) - 1e-12).sum())
    return (count + 1) / (RESAMPLES + 1)
