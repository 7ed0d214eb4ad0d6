"""Which questions a session asks, and in which order; neither changes any answer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from deepinfer_evals.benchmark import Question
from deepinfer_evals.seeds import keyed_order, keyed_subset
from deepinfer_plugin.errors import SettingError

ORDERS = ("file", "reverse", "shuffled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that select questions."""
    parser.add_argument("--samples", type=int, default=None, metavar="N", help="N questions drawn by the run's seed")
    parser.add_argument("--limit", default=None, metavar="K|A-B", help="the first K of them, or those from A to B")
    parser.add_argument("--epochs", type=int, default=1, metavar="E", help="answers to each question (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the run (default 0)")
    parser.add_argument("--order", choices=ORDERS, default="file", help="in which questions are asked (default file)")


def select(questions: Sequence[Question], arguments: argparse.Namespace) -> list[Question]:
    """The selected questions in the order in which they are asked.

    Raises:
        SettingError: a number outside its rule, or nothing is selected.
    """
    if arguments.epochs < 1:
        raise SettingError(f"run: --epochs is {arguments.epochs}, expected 1 or more")
    if not -(2**63) <= arguments.seed < 2**63:
        raise SettingError(f"run: --seed is {arguments.seed}, expected a 64-bit integer")
    chosen = list(questions)
    if arguments.samples is not None:
        if arguments.samples < 1:
            raise SettingError(f"run: --samples is {arguments.samples}, expected 1 or more")
        ids = set(keyed_subset([q.id for q in chosen], arguments.samples, f"samples:{arguments.seed}"))
        chosen = [question for question in chosen if question.id in ids]
    first, last = _limits(arguments.limit, len(chosen))
    chosen = chosen[first:last]
    if not chosen:
        raise SettingError(f"run: --limit {arguments.limit} selects no question, expected some of {len(questions)}")
    if arguments.order == "reverse":
        chosen.reverse()
    elif arguments.order == "shuffled":
        chosen = keyed_order(chosen, f"order:{arguments.seed}")
    return chosen


def _limits(text: str | None, count: int) -> tuple[int, int]:
    """Slice borders of ``K`` (the first K) or ``A-B`` (from the A-th to the B-th, both included)."""
    if text is None:
        return 0, count
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})", text)
    first, last = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise SettingError(f"run: --limit is {text!r}, expected a count K, or A-B with 1 <= A <= B")
    return first - 1, last
