"""Bytes: every share adds up to the checkpoint, the pool is vLLM's, and GPUs hold what they have."""

from __future__ import annotations

from math import prod

import pytest

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.tensors import expected_tensors
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.reference.tiny_config import config_dict
from deepinfer_plugin.replay.settings import EncoderPolicy, ReplaySettings
from deepinfer_plugin.sizing.devices import GPUS
from deepinfer_plugin.sizing.figures import SLICE_KV_TOKENS, SLICE_STEP_TOKENS
from deepinfer_plugin.sizing.memory import DRAFT, ENGRAM, EXPERTS, VISION, VOCABULARY, KVPool, rank_weights
from deepinfer_plugin.sizing.plan import Memory, Options
from deepinfer_plugin.sizing.published import slice_config
from deepinfer_plugin.sizing.steps import Layout

RELEASED = ModelConfig.from_dict(released_config_dict())
NANO = ModelConfig.from_dict(config_dict("nano"))
EXACT = ReplaySettings()


def checkpoint_bytes(config: ModelConfig) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in expected_tensors(config).values())


@pytest.mark.parametrize("config", [RELEASED, NANO], ids=["released", "nano"])
def test_one_rank_holds_the_checkpoint(config: ModelConfig) -> None:
    weights = rank_weights(config, 1, 1, has_drafts=True, has_images=True)
    assert sum(weights.values()) == checkpoint_bytes(config)


@pytest.mark.parametrize(("tensor", "experts"), [(2, 2), (8, 8), (4, 8), (2, 1), (8, 1)])
def test_what_ranks_share_is_held_once(tensor: int, experts: int) -> None:
    whole = rank_weights(RELEASED, 1, 1, has_drafts=True, has_images=True)
    ranks = [
        rank_weights(RELEASED, tensor, experts, has_drafts=True, has_images=True, rank=rank)
        for rank in range(max(tensor, experts))
    ]
    assert sum(rank[EXPERTS] for rank in ranks) == whole[EXPERTS]
    for part in (ENGRAM, VOCABULARY):
        assert sum(rank[part] for rank in ranks[:tensor]) == whole[part]
    assert all(rank[VISION] == whole[VISION] for rank in ranks)


def test_what_is_not_served_is_not_loaded() -> None:
    weights = rank_weights(RELEASED, 1, 1, has_drafts=False, has_images=False)
    assert {DRAFT, VISION} & set(weights) == set()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_the_memory_of_a_gpu_adds_up(tensor: int, drafts: int) -> None:
    layout = Layout(tensor=tensor, replicas=2, shares_experts=True)
    memory = Memory.of(RELEASED, GPUS["H200"], layout, Options(num_drafts=drafts), 8192)
    parts = sum(memory.weights.values()) + memory.runtime + memory.activations + memory.kv + memory.unused
    assert parts == memory.total == int(GPUS["H200"].memory_gib * (1 << 30))
    assert memory.weights[ENGRAM] > 0
    assert (DRAFT in memory.weights) == (drafts > 0)


def test_the_pool_counts_tokens_as_vllm_did_on_the_slice() -> None:
    kv_bytes, length, tokens = SLICE_KV_TOKENS
    pool = KVPool.of(slice_config(), 0, EXACT)
    assert int(pool.vllm_tokens(kv_bytes, 128, length, SLICE_STEP_TOKENS)) == tokens


def test_a_token_of_context_costs_890_bytes() -> None:
    pool = KVPool.of(RELEASED, 0, EXACT)
    assert pool.bytes_per_token == 890
    grown = pool.blocks(128 * 1000) - pool.blocks(128 * 100)
    assert grown * pool.block_bytes == 890 * 128 * 900


def test_windows_of_one_kind_take_fewer_blocks_than_of_two() -> None:
    segment = ReplaySettings(encoder=EncoderPolicy(kind="segment", segment=4096))
    assert [KVPool.of(RELEASED, 0, replay).window_groups for replay in (EXACT, segment)] == [8, 7]


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_a_window_is_covered_wherever_its_pages_begin(drafts: int) -> None:
    pool = KVPool.of(RELEASED, drafts, EXACT)
    pages = [{slot // 32 for slot in range(first, first + 128 + drafts)} for first in range(32)]
    assert max(len(touched) for touched in pages) == pool.window_blocks
