"""Prompts with images: the same changes to a schedule. Loads neither torch nor vLLM."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.draft_relations import RAGGED, speculative_flag
from deepinfer_determinism.engine_facts import CAPTURED_SIZES, CONCURRENT_BATCHES
from deepinfer_determinism.relations import ASYNC_SCHEDULING, BY_NAME, RELATIONS, Setting
from deepinfer_determinism.workload import Sizes, Workload
from deepinfer_plugin.engine_child.plan import Request

PICTURES = ((1, 150, 90), (2, 90, 200), (3, 150, 90), (4, 40, 40))  # two of one size
QUICK = ("order", "chunks", "cache hit")
WITHOUT_IMAGES = ("decode", "eviction", "restart")  # they feed outputs, need long text, or are about processes
_REACHED: Mapping[str, Mapping[str, int]] = {
    "chunks": {m.CHUNKED_PROMPTS: 1},
    "cache hit": {m.CACHED_REQUESTS: 3},
    "async scheduling": {CONCURRENT_BATCHES: 2},
    "graphs": {CAPTURED_SIZES: 1},
}
MARK_FROM_END = 2  # the placeholder is the second last id of the small checkpoints
_SHAPES = (
    *((9, (0,)), (20, (0, 1)), (20, (1, 0)), (3, (0, 0)), (33, (2,)), (1, (3, 3, 0)), (40, (1,)), (12, (0, 2))),
    (15, (0,)),
)
"""Tokens of text before the images, and which images. A hit of 32 tokens ends inside a span or right behind one."""
NUM_OUTPUTS = 6  # more than the drafts of a step
NUM_DRAFTS = 5
QUICK_WITH_DRAFTS = ("chunks",)


def image_probe(
    sizes: Sizes,
    seed: int,
    name: str,
    lead: int,
    pictures: Sequence[int],
    *,
    between: int = 0,
    tail: int = 0,
    max_tokens: int = NUM_OUTPUTS,
    sampling: Mapping[str, Any] | None = None,
) -> Request:
    """A prompt with images; its words depend on ``seed`` and their place only.

    Args:
        sizes: of the model.
        seed: of the workload.
        name: of the request.
        lead: tokens of text before the first image.
        pictures: indices of ``PICTURES``.
        between: tokens of text behind each image.
        tail: tokens of text at the end.
        max_tokens: output tokens.
        sampling: of the request; greedy without.
    """
    draw = random.Random(f"images {seed}")
    text = [draw.randint(3, sizes.vocab_size - 4) for _ in range(80)]
    mark = sizes.vocab_size - MARK_FROM_END
    return Request(
        name=name,
        tokens=tuple(text[:lead] + len(pictures) * [mark, *text[60 : 60 + between]] + text[:tail]),
        images=tuple(PICTURES[picture] for picture in pictures),
        max_tokens=max_tokens,
        sampling=sampling or {},
    )


def image_workload(sizes: Sizes, seed: int) -> Workload:
    """Probes with one to three images, touching or with text between them, at the end of the prompt or inside."""
    probes = []
    for number, (lead, chosen) in enumerate(_SHAPES):
        words = {"between": 3 * (number % 3), "tail": 30 * (number % 3)}
        sampling = {"temperature": 0.9, "seed": 11} if number % 2 else {}
        probes.append(image_probe(sizes, seed, f"image{number}", lead, chosen, **words, sampling=sampling))
    return Workload(sizes=sizes, seed=seed, probes=tuple(probes))


def image_configurations(first: Setting, sizes: Sizes, depth: str, seed: int) -> list[Configuration]:
    """Images without and with drafts; the relations' own counts of text mechanisms are lowered to what they reach."""
    names = QUICK if depth == "quick" else tuple(r.name for r in RELATIONS if r.name not in WITHOUT_IMAGES)
    chosen = tuple(replace(BY_NAME[name], required=_REACHED.get(name, {})) for name in names)
    required = {m.IMAGES: len(_SHAPES) // 2}
    workload = image_workload(sizes, seed)
    plain = Configuration(label="images", setting=first, workload=workload, relations=chosen, required=required)
    drafting = replace(
        plain,
        label=f"images {NUM_DRAFTS} drafts",
        # a step ahead, so that the host counts drafts that do not stand
        setting=replace(
            first,
            flags=(*first.flags, *ASYNC_SCHEDULING, speculative_flag(NUM_DRAFTS)),
            drafter="partly",
            lengths=RAGGED,
        ),
        relations=tuple(item for item in chosen if depth != "quick" or item.name in QUICK_WITH_DRAFTS),
        required={
            **required,
            CONCURRENT_BATCHES: 2,
            m.VERIFIED_AT_ONCE: NUM_DRAFTS,
            m.ACCEPTED_DRAFTS: 1,
            m.REJECTED_DRAFTS: 1,
        },
        base=plain,
    )
    return [plain, drafting]
