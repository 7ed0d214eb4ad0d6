"""Requests whose lengths lie on both sides of every threshold that the code compares with a length.

Loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_plugin.engine_child.plan import Request

ROW_TILE = 16  # tiling.REFERENCE_ROW_TILE and KEY_TILE; a test compares them
KEY_TILE = 64
PAGES = (32, 128)  # tokens in a block of window records, and of entries
FIRST_TOKEN = 3  # below are the special tokens of the small checkpoints
SPECIAL_AT_THE_END = 3  # noise, image and pad ids
MAX_PROMPT = 260  # quick set; prompts and outputs fit --max-model-len=512
MAX_PROMPT_FULL = 460
FULL_PROBES = 30

# Sampling parameters that the probes take in turn; the first is greedy.
SAMPLING: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.3, "seed": 11, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "seed": (1 << 63) + 5, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 12, "logit_bias": {"17": 2.5, "40": -3.0}, "bad_words": []},
    {"frequency_penalty": 0.4},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of the language model's config.json: what a length is compared with, and how many caches there are."""

    vocab_size: int
    sliding_window: int
    index_topk: int
    candidate_entries: int
    ratios: tuple[int, ...]
    num_layers: int
    num_rings: int

    @classmethod
    def from_model_dir(cls, folder: Path) -> Sizes:
        """Read config.json."""
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = value.get("text_config", value)
        return cls(
            vocab_size=text["vocab_size"],
            sliding_window=text["sliding_window"],
            index_topk=text["index_topk"],
            candidate_entries=text["candidate_topk_blocks"] * text["candidate_block_size"],
            ratios=tuple(sorted({ratio for ratio in text["compress_ratios"] if ratio > 0})),
            num_layers=text["num_hidden_layers"],
            num_rings=sum(text["compress_ratios"][layer] > 1 for layer in text["kv_source_layer_ids"]),
        )

    def edges(self) -> tuple[int, ...]:
        """Prompt lengths: every threshold of tokens, one less and one more."""
        thresholds = {2, self.sliding_window, ROW_TILE, KEY_TILE, *PAGES}
        for ratio in self.ratios:
            thresholds |= {self.index_topk * ratio, self.candidate_entries * ratio, KEY_TILE * ratio}
        near = {length + step for length in thresholds for step in (-1, 0, 1)}
        return tuple(sorted(length for length in near if 0 < length <= MAX_PROMPT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Probes, whose rows are compared; ``neighbour`` makes requests whose rows are not."""

    sizes: Sizes
    seed: int
    probes: tuple[Request, ...]

    @classmethod
    def build(cls, sizes: Sizes, seed: int, num_outputs: int = 3) -> Workload:
        """One probe per edge length, greedy and sampled in turn, every second with all its prompt rows.

        The last probes repeat one prompt under several seeds, ask for three samples, and continue a shared prefix.
        """
        draw = random.Random(f"workload {seed}")
        probes = []
        for number, length in enumerate(sizes.edges()):
            sampling = dict(SAMPLING[number % len(SAMPLING)])
            probes.append(
                Request(
                    name=f"p{length}",
                    tokens=_tokens(draw, sizes, length),
                    max_tokens=num_outputs + number % 2,
                    prompt_rows=number % 2 == 0,
                    sampling=sampling,
                )
            )
        shared = _tokens(draw, sizes, 2 * PAGES[0] + 5)
        for twin in (1, 2):
            sampling = {"temperature": 1.0, "seed": twin}
            probes.append(Request(name=f"twin{twin}", tokens=shared, max_tokens=num_outputs, sampling=sampling))
        samples = {"temperature": 1.0, "seed": 1, "n": 3}
        probes.append(Request(name="samples", tokens=shared[:-3], max_tokens=num_outputs, sampling=samples))
        longer = shared + _tokens(draw, sizes, PAGES[0] + 1)
        probes.append(Request(name="longer", tokens=longer, max_tokens=num_outputs))
        return cls(sizes=sizes, seed=seed, probes=tuple(probes))

    @classmethod
    def build_full(cls, sizes: Sizes, seed: int) -> Workload:
        """The probes of ``build`` and many long ones with all their prompt rows, which cost little per row."""
        quick = cls.build(sizes, seed)
        draw = random.Random(f"full workload {seed}")
        edges = sizes.edges()
        lengths = [draw.randint(140, MAX_PROMPT_FULL) for _ in range(FULL_PROBES)]
        lengths += [edge + 128 for edge in edges]
        long = []
        for number, length in enumerate(lengths):
            sampling = dict(SAMPLING[number % len(SAMPLING)])
            tokens = _tokens(draw, sizes, length)
            has_rows = number % 5 != 4
            long.append(
                Request(name=f"q{number}", tokens=tokens, max_tokens=2, prompt_rows=has_rows, sampling=sampling)
            )
        return cls(sizes=sizes, seed=seed, probes=(*quick.probes[:-4], *long, *quick.probes[-4:]))

    def few(self, step: int = 3) -> tuple[Request, ...]:
        """Every ``step``-th probe, and the last four: for relations that cost many engine steps."""
        return self.probes[:-4:step] + self.probes[-4:]

    def neighbour(self, name: str, length: int, outputs: int = 2, *, salt: str = "", **sampling: Any) -> Request:
        """A request with random tokens; another ``salt`` gives other tokens under the same name."""
        draw = random.Random(f"neighbour {self.seed} {name} {salt}")
        return Request(name=name, tokens=_tokens(draw, self.sizes, length), max_tokens=outputs, sampling=sampling)


def renamed(request: Request, suffix: str) -> Request:
    """The same request under the name ``name@suffix``; what is compared is the name before the ``@``."""
    return replace(request, name=f"{request.name}@{suffix}")


def base_name(name: str) -> str:
    """The name of the probe that a request repeats."""
    return name.partition("@")[0]


def _tokens(draw: random.Random, sizes: Sizes, length: int) -> tuple[int, ...]:
    last = sizes.vocab_size - SPECIAL_AT_THE_END - 1
    return tuple(draw.randint(FIRST_TOKEN, last) for _ in range(length))
