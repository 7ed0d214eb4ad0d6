"""Seeds and other choices that must not depend on the order of anything: each is a function of names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

RULE = "sha256-53-v1"  # stands in the manifest; another derivation is another name
SEED_BITS = 53  # JSON readers that keep numbers as doubles leave it alone


def sample_seed(run_seed: int, benchmark: str, question_id: str, epoch: int) -> int:
    """Seed of one answer: the same in every order, subset and concurrency.

    Args:
        run_seed: of the whole run.
        benchmark: its name.
        question_id: unique in the benchmark.
        epoch: from 1.

    Returns:
        0 to 2^53 - 1.
    """
    return _number("sample", run_seed, benchmark, question_id, epoch) >> (256 - SEED_BITS)


def keyed_order[Value](values: Sequence[Value], key: str) -> list[Value]:
    """The values in an order that ``key`` alone decides, whatever was shuffled before."""
    ranked = sorted(range(len(values)), key=lambda index: _number("order", key, index))
    return [values[index] for index in ranked]


def keyed_subset(ids: Sequence[str], size: int, key: str) -> list[str]:
    """``size`` of the ids, chosen by ``key`` and each id alone: a larger choice contains a smaller one."""
    chosen = set(sorted(ids, key=lambda text: _number("subset", key, text))[:size])
    return [text for text in ids if text in chosen]


def _number(*parts: str | int) -> int:
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest())
