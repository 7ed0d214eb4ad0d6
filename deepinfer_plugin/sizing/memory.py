"""Bytes of one rank: weights as the loader deals them out, and the blocks of vLLM's KV pool that requests hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_plugin.cache.records import pair_state_rows
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.shares import Shares
from deepinfer_plugin.model.stage import Stage
from deepinfer_plugin.model.tensors import TensorSpec, expected_tensors
from deepinfer_plugin.replay.memory import (
    BLOCK,
    WINDOW_BLOCK,
    growing_bytes_per_token,
    pool_block_bytes,
    window_record_bytes,
)
from deepinfer_plugin.replay.settings import ReplaySettings

EXPERTS, ENGRAM, VOCABULARY, LAYERS, DRAFT, VISION = (
    "experts",
    "engram tables",
    "vocabulary",
    "other layers",
    "draft blocks",
    "image tower",
)
_EXPERT = re.compile(r"experts\.\d+\.")
_PARTS = (
    (re.compile(r"layers\.\d+\.ffn\.experts\..+"), EXPERTS),
    (re.compile(r"layers\.\d+\.engram\.embed\..+"), ENGRAM),
    (re.compile(r"(embed|head)\.weight"), VOCABULARY),
)


def _part(name: str, spec: TensorSpec) -> str:
    if spec.group != "text":
        return DRAFT if spec.group == "draft" else VISION
    return next((part for pattern, part in _PARTS if pattern.fullmatch(name)), LAYERS)


@lru_cache(maxsize=8)
def _tensors(config: ModelConfig) -> tuple[tuple[str, str, TensorSpec, int], ...]:
    """(part, name, spec, how often): experts of a layer are alike, so the last one stands for all of them."""
    found: dict[str, tuple[str, str, TensorSpec, int]] = {}
    for name, spec in expected_tensors(config).items():
        kind = _EXPERT.sub("experts.", name)
        count = found[kind][3] if kind in found else 0
        found[kind] = (_part(name, spec), name, spec, count + 1)
    return tuple(found.values())


@lru_cache(maxsize=64)
def rank_weights(
    config: ModelConfig,
    tensor_size: int,
    expert_size: int,
    *,
    has_drafts: bool,
    has_images: bool,
    rank: int = 0,
    stage: Stage = Stage(),  # noqa: B008, frozen
) -> Mapping[str, int]:
    """Bytes of the weights of one rank, by part.

    Args:
        config: of the model.
        tensor_size: ranks that share every layer.
        expert_size: ranks that whole routed experts are dealt out to; divides their number. 1: ranks of ``tensor_size``
            cut every expert by outputs.
        has_drafts: whether the draft blocks are loaded.
        has_images: whether the image tower is loaded.
        rank: among those of ``expert_size``, or of ``tensor_size``; ranks differ by the rows of their Engram tables.
        stage: layers that it holds.
    """
    parallel = Parallel(
        tensor=Ranks(rank=rank % tensor_size, size=tensor_size),
        experts=Ranks(rank=rank % expert_size, size=expert_size),
        stage=stage,
    )
    shares = Shares(config, parallel)
    total: dict[str, int] = {}
    for part, name, spec, count in _tensors(config):
        if (part == DRAFT and not has_drafts) or (part == VISION and not has_images) or not stage.has_tensor(name):
            continue
        rows = range(spec.shape[0] // parallel.expert_outputs.size) if count > 1 else shares.rows(name, spec)
        if rows is not None:
            here = len(rows) * prod(spec.shape[1:]) * spec.dtype.itemsize
            total[part] = total.get(part, 0) + here * (count // expert_size if count > 1 else 1)
    return MappingProxyType(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """The pool that all caches of a rank share, as ``cache/groups.py`` groups them.

    Attributes:
        block_bytes: of a block: 128 tokens of the growing caches.
        window_groups: groups of windows; each holds blocks of its own.
        ring_groups: groups of rings of unpaired latents.
        window_blocks: blocks of one window group that a decoding request holds.
        bytes_per_token: of the growing caches.
    """

    block_bytes: int
    window_groups: int
    ring_groups: int
    window_blocks: int
    bytes_per_token: float

    @classmethod
    def of(cls, config: ModelConfig, num_drafts: int, replay: ReplaySettings) -> KVPool:
        """The pool of a model that verifies ``num_drafts`` drafts a step.

        Windows that are kept with their prefix are of another kind than those that are computed again: the encoder's
        and the decoder's under ``exact``. Windows of draft blocks are of the decoder's kind.
        """
        block_bytes = pool_block_bytes(config)
        page_bytes = WINDOW_BLOCK * window_record_bytes(config.head_dim)
        encoder = config.kv_source_layer_ids[-1]
        decoder = config.num_hidden_layers - encoder + (config.num_nextn_predict_layers if num_drafts else 0)
        is_split = replay.is_on and replay.encoder.kind == "exact"
        kinds = (encoder, decoder) if is_split else (encoder + decoder,)
        ring_bytes = pair_state_rows(num_drafts) * 2 * config.head_dim * 4
        rings = sum(config.ratio(layer) == 2 for layer in config.kv_source_layer_ids)
        rows = config.sliding_window + num_drafts  # in the worst place they begin at the last row of a page
        return cls(
            block_bytes=block_bytes,
            window_groups=sum(_groups(count, page_bytes, block_bytes) for count in kinds),
            ring_groups=_groups(rings, ring_bytes, block_bytes),
            window_blocks=-(-(rows - 1) // WINDOW_BLOCK) + 1,
            bytes_per_token=growing_bytes_per_token(config),
        )

    @property
    def fixed_blocks(self) -> int:
        """Blocks of a decoding request that do not grow with it."""
        return self.window_groups * self.window_blocks + self.ring_groups

    def blocks(self, num_tokens: int) -> int:
        """Blocks of a decoding request of so many tokens."""
        return -(-num_tokens // BLOCK) + self.fixed_blocks

    def step_blocks(self, num_tokens: int) -> int:
        """Blocks that a prefill step of so many tokens holds beside: windows behind it are freed when it has ended."""
        return self.window_groups * -(-num_tokens // WINDOW_BLOCK)

    def vllm_tokens(self, kv_bytes: int, window: int, num_tokens: int, step_tokens: int) -> float:
        """What vLLM reports at its start as the size of the cache.

        It takes every request to hold ``num_tokens`` and, in every group of windows, the rows of a whole step.
        """
        pages = -(-(window - 1 + step_tokens) // WINDOW_BLOCK) + 1
        blocks = -(-num_tokens // BLOCK) + self.window_groups * pages + self.ring_groups
        return kv_bytes // self.block_bytes / blocks * num_tokens


def _groups(num_caches: int, page_bytes: int, block_bytes: int) -> int:
    return -(-num_caches // max(block_bytes // page_bytes, 1)) if num_caches else 0
