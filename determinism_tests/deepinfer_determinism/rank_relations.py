"""Configurations of several ranks: the same changes to a schedule, in engines of two processes that share the model.

What they are compared with is one rank that has each probe alone. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.engine_facts import RANKS
from deepinfer_determinism.relations import BY_NAME

TENSOR, EXPERTS = "--tensor-parallel-size=2", "--enable-expert-parallel"
QUICK = ("arrival",)  # a step of two ranks costs two processes: one case, of the cheapest relation with chunks
WITHOUT_RANKS = ("restart",)  # it is about processes
FULL: Mapping[str, tuple[tuple[str, ...], Sequence[str]]] = {
    "ranks 2": ((TENSOR, EXPERTS), tuple(name for name in BY_NAME if name not in WITHOUT_RANKS)),
    "ranks 2 tensor": ((TENSOR,), ("neighbours", "chunks", "cache hit", "preemption")),
}


def rank_configurations(base: Configuration, depth: str) -> list[Configuration]:
    """All configurations of several ranks of a depth; none where a device would be needed for each.

    Args:
        base: of one rank, in an arithmetic that shows the order of sums.
        depth: ``quick`` or ``full``.
    """
    if base.setting.device != "cpu":
        return []
    table = FULL if depth == "full" else {"ranks 2": (FULL["ranks 2"][0], QUICK)}
    return [
        Configuration(
            label=label,
            setting=replace(base.setting, flags=(*base.setting.flags, *flags)),
            workload=base.workload,
            relations=tuple(BY_NAME[name] for name in names),
            required={RANKS: 2},
            base=base,
        )
        for label, (flags, names) in table.items()
    ]
