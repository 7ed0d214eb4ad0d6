"""Prompts with images: the same changes to a schedule. Loads neither torch nor vLLM."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from deepinfer_determinism import mechanisms as m
from deepinfer_determinism.cases import Configuration
from deepinfer_determinism.relations import BY_NAME, RELATIONS, Setting
from deepinfer_determinism.workload import Sizes, Workload
from deepinfer_plugin.engine_child.plan import Request

PICTURES = ((1, 150, 90), (2, 90, 200), (3, 150, 90), (4, 40, 40))  # two of one size
QUICK = ("order", "chunks", "cache hit")
WITHOUT_IMAGES = ("decode", "eviction", "restart")  # they feed outputs, need long text, or are about processes
_REACHED: Mapping[str, Mapping[str, int]] = {"chunks": {m.CHUNKED_PROMPTS: 1}, "cache hit": {m.CACHED_REQUESTS: 3}}
MARK_FROM_END = 2  # the placeholder is the second last id of the small checkpoints
_SHAPES = ((9, (0,)), (20, (0, 1)), (20, (1, 0)), (3, (0, 0)), (33, (2,)), (1, (3, 3, 0)), (40, (1,)), (12, (0, 2)))
"""Tokens of text before the images, and which images."""


def image_workload(sizes: Sizes, seed: int) -> Workload:
    """Probes with one to three images, touching or with text between them, at the end of the prompt or inside."""
    draw = random.Random(f"images {seed}")
    text = [draw.randint(3, sizes.vocab_size - 4) for _ in range(80)]
    mark = sizes.vocab_size - MARK_FROM_END
    probes = []
    for number, (lead, chosen) in enumerate(_SHAPES):
        tokens = text[:lead]
        tokens += len(chosen) * [mark, *text[60 : 60 + 3 * (number % 3)]]
        sampling = {"temperature": 0.9, "seed": 11} if number % 2 else {}
        probes.append(
            Request(
                name=f"image{number}",
                tokens=tuple(tokens + text[: 30 * (number % 3)]),
                images=tuple(PICTURES[image] for image in chosen),
                max_tokens=3,
                sampling=sampling,
            )
        )
    return Workload(sizes=sizes, seed=seed, probes=tuple(probes))


def image_configurations(first: Setting, sizes: Sizes, depth: str, seed: int) -> list[Configuration]:
    """The configuration with images; the relations' own counts of text mechanisms are lowered to what it reaches."""
    names = QUICK if depth == "quick" else tuple(r.name for r in RELATIONS if r.name not in WITHOUT_IMAGES)
    chosen = tuple(replace(BY_NAME[name], required=_REACHED.get(name, {})) for name in names)
    required = {m.IMAGES: len(_SHAPES) // 2}
    return [
        Configuration(
            label="images",
            setting=first,
            workload=image_workload(sizes, seed),
            relations=chosen,
            required=required,
        )
    ]
