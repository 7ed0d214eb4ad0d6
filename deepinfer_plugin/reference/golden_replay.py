"""The golden P and H grids of bounded replay as cases to run (golden/README.md §4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer_plugin.reference.golden import Checkpoint, GoldenCase
from deepinfer_plugin.settings import Arithmetic

KEYS = (Checkpoint("nano", 0), Checkpoint("nano", 1), Checkpoint("tiny", 0))
NUM_FED = 8  # tokens after the prompt, one at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase:
    """One golden case with the rule it was made under."""

    case: GoldenCase
    hit: int
    keep_tokens: int


def replay_cases(path: Path, key: Checkpoint, arithmetic: Arithmetic) -> Iterator[ReplayCase]:
    """Cases of a ``replay`` file; the kept rows are the window, or K of ``logits_keepK``."""
    tensors, mode = load_file(path), arithmetic.value
    window = {"tiny": 16, "nano": 8}[key.name]
    for name in sorted(tensors):
        prefix, _, kind = name.partition(".logits")
        if not name.endswith(f".{mode}") or not kind or kind.startswith("_cut"):
            continue
        stable = name.replace(".logits", ".stable")
        keep_tokens = int(kind.split(".")[0].removeprefix("_keep") or window)
        num_prompt, hit = (int(part[1:]) for part in prefix.split("."))
        logits = tensors[name]
        first = num_prompt + NUM_FED - logits.shape[0]
        case = GoldenCase(
            checkpoint=key,
            label=f"{path.stem} {name}",
            arithmetic=arithmetic,
            tokens=tensors[f"{prefix}.seq.{mode}"].long(),
            num_prompt=num_prompt,
            rows=torch.arange(first, num_prompt + NUM_FED),
            logits=logits,
            is_stable=tensors[stable].bool(),
        )
        yield ReplayCase(case=case, hit=hit, keep_tokens=keep_tokens)
