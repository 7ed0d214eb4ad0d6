"""How many drafts of each request a step verifies: as many as make tokens come fastest. Pure functions; no engine.

A draft is worth its chance to be accepted, the product of the confidences up to it, and costs the time by which its row
lengthens the step. The answer does not depend on the choice, so confidences of the very drafts that are judged may make
it; a sampler that rejects by chance would need older ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_DRAFT = -1.0  # sorts behind every draft


def survival(confidence: NDArray[np.floating], num_drafts: NDArray[np.integer]) -> NDArray[np.float64]:
    """The chance of each draft to be accepted: the running product of its request's confidences.

    Args:
        confidence: [num_reqs, max_drafts], the chance of a draft if all before it are accepted; brought into 0 to 1,
            NaN counts as 0.
        num_drafts: [num_reqs], drafts that each request has.

    Returns:
        [num_reqs, max_drafts] fp64, falling along a row; -1 where there is no draft.
    """
    chance = np.clip(np.nan_to_num(confidence.astype(np.float64), nan=0.0), 0.0, 1.0)
    place = np.arange(confidence.shape[1])
    return np.where(place < num_drafts[:, None], np.cumprod(chance, axis=1), _NO_DRAFT)


def verified_lengths(
    confidence: NDArray[np.floating],
    num_drafts: NDArray[np.integer],
    num_other_rows: int,
    num_sampling: int,
    step_times: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Drafts that each request verifies: its first ones that rank inside the best total.

    The best total B makes ``(num_sampling + the B largest chances) / step_times[num_other_rows + B]`` largest; of equal
    ones the smaller. Equal chances go to the lower request, then to the lower draft.

    Args:
        confidence: [num_reqs, max_drafts], see ``survival``.
        num_drafts: [num_reqs], drafts that each request has.
        num_other_rows: rows of the step that are no drafts.
        num_sampling: requests that get a token in any case.
        step_times: [at least num_other_rows + sum of num_drafts + 1] fp64, positive, time of a step by its rows.

    Returns:
        [num_reqs] int64.

    Source: DI, csrc/engine/mtp_varlen.hpp (spec §4.7).
    """
    chances = survival(confidence, num_drafts)
    best_first = np.argsort(-chances, axis=None, kind="stable")[: int(num_drafts.sum())]
    tokens = num_sampling + np.concatenate(([0.0], np.cumsum(chances.ravel()[best_first])))
    times = step_times[num_other_rows : num_other_rows + len(tokens)]
    total = int(np.argmax(tokens / times))  # the first of equal ones
    is_verified = np.zeros(chances.size, dtype=np.bool_)
    is_verified[best_first[:total]] = True
    found: NDArray[np.int64] = is_verified.reshape(chances.shape).sum(axis=1)
    return found
