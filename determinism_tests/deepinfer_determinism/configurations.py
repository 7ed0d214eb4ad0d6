"""Which relations are tried in which configuration, as data. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism import relations
from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.draft_relations import draft_configurations
from deepinfer_determinism.engine_facts import CONCURRENT_BATCHES
from deepinfer_determinism.image_relations import image_configurations
from deepinfer_determinism.random_hits import RANDOM_HITS, num_prompts, random_hits_workload
from deepinfer_determinism.rank_relations import rank_configurations
from deepinfer_determinism.relations import BACKTRACKING, RELATIONS, SMALL_BLOCKS, Relation, Setting, steps_at_once
from deepinfer_determinism.workload import PAGES, Sizes, Workload
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE
from deepinfer_plugin.scheduling.concurrent_batches import MOST
from deepinfer_plugin.settings import Arithmetic

ALL_RELATIONS: tuple[Relation, ...] = (*RELATIONS, *RANDOM_HITS)
# Tried in fp32 too: there the order of a sum shows, which the roundings of the served arithmetic nearly always hide.
SENSITIVE = ("neighbours", "chunks", "cache hit", "preemption", "decode")
# Tried with steps planned ahead: those that change the steps of a request.
STEP_AHEAD = (
    "neighbours",
    "chunks",
    "tiny chunks",
    "cache hit",
    "preemption",
    "eviction",
    "max_num_seqs",
    "slot",
    "structured output",
    "lifecycle",
    "canaries",
)
SEGMENT = f"segment:{PAGES[0]}"
# What the quick set tries with bounded replay, by policy and arithmetic.
QUICK_REPLAY: Mapping[tuple[str, Arithmetic], tuple[str, ...]] = {
    ("exact", Arithmetic.REF): ("neighbours", "chunks", "cache hit", "preemption"),
    (SEGMENT, Arithmetic.REF): ("chunks", "cache hit"),
    ("exact", Arithmetic.S32): ("chunks", "cache hit", "preemption"),
    (SEGMENT, Arithmetic.S32): ("cache hit",),
}


def configurations(first: Setting, sizes: Sizes, depth: str, seed: int, num_places: int = 0) -> list[Configuration]:
    """All configurations of a depth.

    Args:
        first: the one of the command line.
        sizes: of its checkpoint.
        depth: ``quick`` or ``full``.
        seed: of the workload.
        num_places: for ranks on the GPUs that this process may use; without meaning on the CPU.
    """
    build = Workload.build if depth == "quick" else Workload.build_full
    workload = build(sizes, seed)
    s32, q32 = (replace(first, arithmetic=arithmetic) for arithmetic in (Arithmetic.S32, Arithmetic.Q32))
    found = [Configuration(label="", setting=first, workload=workload, relations=RELATIONS)]
    in_s32 = RELATIONS if depth == "full" else _relations(SENSITIVE)
    found.append(Configuration(label="s32", setting=s32, workload=workload, relations=in_s32))
    found += rank_configurations(found[1], found[0], depth, num_places)
    if depth == "full":
        found += _ahead(found[0])
        found.append(Configuration(label="q32", setting=q32, workload=workload, relations=RELATIONS))
        other = build(sizes, seed + 1)
        found.append(Configuration(label=f"seed {seed + 1}", setting=first, workload=other, relations=RELATIONS))
    found += image_configurations(first, sizes, depth, seed)
    found += _with_replay(first, sizes, depth, workload)
    return found + draft_configurations(first, Workload.build(sizes, seed), depth)


def _ahead(base: Configuration) -> list[Configuration]:
    """With one step planned ahead, as every engine on an accelerator has it and none on the CPU, and with three."""
    labels = {2: "step ahead"} if base.setting.device == "cpu" else {}
    labels[MOST] = f"{MOST - 1} steps ahead"
    return [
        replace(
            base,
            label=label,
            setting=replace(base.setting, flags=(*base.setting.flags, *steps_at_once(count))),
            relations=_relations(STEP_AHEAD),
            required={CONCURRENT_BATCHES: count},
            base=base,
        )
        for count, label in labels.items()
    ]


def _relations(names: Sequence[str]) -> tuple[Relation, ...]:
    return tuple(relations.BY_NAME[name] for name in names)


def _with_replay(first: Setting, sizes: Sizes, depth: str, workload: Workload) -> list[Configuration]:
    """Bounded replay on. Probes ask for no prompt rows: those that do are computed without decoder replay."""
    cut = replace(workload, probes=tuple(replace(probe, prompt_rows=False) for probe in workload.probes))
    kept = tuple(relation for relation in RELATIONS if relation.is_kept_by_replay)
    in_s32 = tuple(relation for relation in _relations(SENSITIVE) if relation.is_kept_by_replay)
    found = []
    for (encoder, arithmetic), quick in QUICK_REPLAY.items():
        setting = replay_setting(replace(first, arithmetic=arithmetic), sizes, encoder)
        found.append(
            Configuration(
                label=_label("replay", encoder, arithmetic),
                setting=setting,
                workload=cut,
                relations=_relations(quick) if depth == "quick" else kept if arithmetic is Arithmetic.REF else in_s32,
                required=_replay_happened(encoder),
            )
        )
    random = random_hits_workload(sizes, workload.seed, num_prompts(depth))
    for encoder in ("exact", f"segment:{2 * PAGES[0]}"):
        found.append(
            Configuration(
                label=_label("random", encoder, first.arithmetic),
                setting=replay_setting(first, sizes, encoder),
                workload=random,
                relations=RANDOM_HITS if depth == "full" else RANDOM_HITS[:2],
                required=_replay_happened(encoder),
            )
        )
    return found


def _label(kind: str, encoder: str, arithmetic: Arithmetic) -> str:
    return " ".join([kind, encoder, *([] if arithmetic is Arithmetic.REF else [arithmetic.value])])


def _replay_happened(encoder: str) -> Mapping[str, int]:
    return {m.LEFT_OUT_ROWS: 1} if encoder == "exact" else {m.LEFT_OUT_ROWS: 1, m.REPLAYED_ROWS: 1}


def replay_setting(setting: Setting, sizes: Sizes, encoder: str) -> Setting:
    """The setting with bounded replay; ``encoder`` is the value of DEEPINFER_ENCODER_REPLAY."""
    keep = sizes.sliding_window + BACKTRACKING
    variables = {MODE_VARIABLE: "compact", KEEP_VARIABLE: str(keep), ENCODER_VARIABLE: encoder}
    flags = () if encoder == "exact" else (SMALL_BLOCKS,)  # a segment is a multiple of the block, and short here
    return replace(setting, flags=(*setting.flags, *flags), variables=variables)
