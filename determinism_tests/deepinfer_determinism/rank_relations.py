"""Configurations of several ranks: the same changes to a schedule, in engines of two processes that share the model,
every layer of it or as two stages.

What they are compared with is one rank that has each probe alone. On GPUs the served arithmetic is tried as well: it
decodes in captured graphs, exchanges of ranks included, and fp32 rows cannot. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.engine_facts import CAPTURED_SIZES, RANKS
from deepinfer_determinism.relations import BY_NAME
from deepinfer_plugin.engine_child.gpus import lack_of_gpus

NUM_RANKS = 2
TENSOR, EXPERTS = "--tensor-parallel-size=2", "--enable-expert-parallel"
STAGES = "--pipeline-parallel-size=2"
QUICK = ("arrival",)  # a step of two ranks costs two processes: one case, of the cheapest relation with chunks
QUICK_S32, QUICK_REF = "ranks 2", "ranks 2 tensor"  # whole experts, then experts that ranks share by outputs
WITHOUT_RANKS = ("restart",)  # it is about processes
FULL: Mapping[str, tuple[tuple[str, ...], Sequence[str]]] = {
    "ranks 2": ((TENSOR, EXPERTS), tuple(name for name in BY_NAME if name not in WITHOUT_RANKS)),
    "ranks 2 tensor": ((TENSOR,), ("neighbours", "chunks", "cache hit", "preemption")),
    "ranks 2 stages": (
        (STAGES,),
        ("neighbours", "chunks", "cache hit", "preemption", "max_num_seqs", "structured output", "lifecycle"),
    ),
}


def rank_configurations(s32: Configuration, ref: Configuration, depth: str, num_places: int) -> list[Configuration]:
    """All configurations of several ranks of a depth; on too few GPUs each says that it cannot be tried there.

    Args:
        s32: of one rank, in an arithmetic that shows the order of sums.
        ref: of one rank, in the served arithmetic.
        depth: ``quick`` or ``full``.
        num_places: for ranks on the GPUs that this process may use; without meaning on the CPU.
    """
    found = _of_base(s32, depth, QUICK_S32, required={RANKS: NUM_RANKS})
    if s32.setting.device == "cpu":
        return found
    found += _of_base(ref, depth, QUICK_REF, suffix=" ref", required={RANKS: NUM_RANKS, CAPTURED_SIZES: 1})
    return [replace(item, not_applicable=lack_of_gpus(NUM_RANKS, num_places)) for item in found]


def _of_base(
    base: Configuration, depth: str, quick: str, *, required: Mapping[str, int], suffix: str = ""
) -> list[Configuration]:
    table = FULL if depth == "full" else {quick: (FULL[quick][0], QUICK)}
    return [
        Configuration(
            label=label + suffix,
            setting=replace(base.setting, flags=(*base.setting.flags, *flags)),
            workload=base.workload,
            relations=tuple(BY_NAME[name] for name in names),
            required=required,
            base=base,
        )
        for label, (flags, names) in table.items()
    ]
