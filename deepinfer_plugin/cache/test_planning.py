"""Bytes of the KV cache at the released size: from our specifications and from vLLM's own plan, in a child process."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.replay.memory import WINDOW_BLOCK, prefix_cost
from deepinfer_plugin.replay.settings import ENCODER_VARIABLE, EncoderPolicy, ReplaySettings
from deepinfer_plugin.sizing.memory import KVPool
from deepinfer_plugin.variables import VARIABLES

BYTES_PER_TOKEN = 890
BLOCK_SIZE = 128
WINDOW_BYTES, COMPRESSED_BYTES, INDEX_BYTES = 528, 288, 68
NUM_LAYERS = 40
SLIDING_WINDOW = 128
SEGMENT = EncoderPolicy(kind="segment", segment=4096)
RATIOS = {2: 2, 8: 2, 14: 2, 20: 1}  # KV-source layer -> tokens per entry

Cache = dict[str, Any]


SMALL = {  # one KV source of each ratio: every kind of growing cache occurs once
    "num_hidden_layers": 8,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "dspark_target_layer_ids": [5, 6, 7],
}


def _write_model(folder: Path, changes: dict[str, Any]) -> None:
    """The released config.json without Engram, which needs the real tokenizer, and a tokenizer of its size."""
    config = released_config_dict()
    config["text_config"].update(engram_layer_ids=[], engram_num_embeddings=[], **changes)
    vocab = {f"token{index}": index for index in range(config["text_config"]["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "token0"},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``CachePlan`` of the released model, as JSON, with the default settings."""
    return _plan(tmp_path_factory.mktemp("released"), {})


@pytest.fixture(scope="module")
def segment_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same where no window is kept with its prefix."""
    return _plan(tmp_path_factory.mktemp("segment"), {ENCODER_VARIABLE: str(SEGMENT)})


def _plan(folder: Path, variables: dict[str, str], changes: dict[str, Any] | None = None) -> dict[str, Any]:
    _write_model(folder, changes or {})
    out = folder / "plan.json"
    command = [sys.executable, "-m", "deepinfer_plugin.engine_child.planning", str(folder), str(out)]
    ours: dict[str, str | None] = {variable.name: None for variable in VARIABLES}
    ours["DEEPINFER_ACCELERATOR"] = "cpu"
    environment = envs.child_environment({**ours, **variables})
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return loaded


def _named(plan: dict[str, Any], ending: str) -> dict[int, Cache]:
    """Caches whose name ends so, by layer."""
    found = [cache for cache in plan["caches"] if cache["name"].endswith(ending)]
    return {int(cache["name"].split("layers.")[1].split(".")[0]): cache for cache in found}


def test_records_have_the_specified_bytes(plan: dict[str, Any]) -> None:
    windows, entries, keys = (_named(plan, ending) for ending in (".window", ".entries", ".keys"))
    assert sorted(windows) == list(range(NUM_LAYERS))
    assert {cache["page_bytes"] / cache["block_size"] for cache in windows.values()} == {WINDOW_BYTES}
    for caches, record_bytes in ((entries, COMPRESSED_BYTES), (keys, INDEX_BYTES)):
        per_token = {layer: cache["page_bytes"] / cache["block_size"] for layer, cache in caches.items()}
        assert per_token == {layer: record_bytes / ratio for layer, ratio in RATIOS.items()}


def test_specifications_grow_by_890_bytes_per_token(plan: dict[str, Any]) -> None:
    growing = [cache for cache in plan["caches"] if cache["kind"] == "MLAAttentionSpec"]
    assert len(growing) == 2 * len(RATIOS)
    assert sum(cache["page_bytes"] / cache["block_size"] for cache in growing) == BYTES_PER_TOKEN


def test_a_block_of_vllms_pool_is_128_tokens_of_890_bytes(plan: dict[str, Any]) -> None:
    growing = [cache for cache in plan["caches"] if cache["kind"] == "MLAAttentionSpec"]
    assert len({cache["group"] for cache in growing}) == 1
    assert {cache["block_size"] for cache in growing} == {BLOCK_SIZE}
    assert plan["pool_bytes"] / plan["num_blocks"] == BYTES_PER_TOKEN * BLOCK_SIZE
    assert {cache["block_stride"] for cache in plan["caches"]} == {BYTES_PER_TOKEN * BLOCK_SIZE}


def _kept(plan: dict[str, Any]) -> list[int]:
    """Layers whose windows are kept with their prefix."""
    return sorted(layer for layer, cache in _named(plan, ".window").items() if cache["is_prefix_cacheable"])


def test_the_windows_of_the_encoder_are_kept_under_exact_and_none_under_segment(
    plan: dict[str, Any], segment_plan: dict[str, Any]
) -> None:
    assert _kept(plan) == list(range(max(RATIOS)))
    assert _kept(segment_plan) == []
    for one in (plan, segment_plan):
        growing = [cache for cache in one["caches"] if cache["kind"] == "MLAAttentionSpec"]
        assert all(cache["is_prefix_cacheable"] for cache in growing)


@pytest.mark.parametrize("policy", [EncoderPolicy(), SEGMENT], ids=str)
def test_the_cost_of_a_cached_prefix_is_that_of_vllms_plan(
    policy: EncoderPolicy, plan: dict[str, Any], segment_plan: dict[str, Any]
) -> None:
    found = plan if policy == EncoderPolicy() else segment_plan
    cost = prefix_cost(ModelConfig.from_dict(released_config_dict()), policy)
    kept = [cache for cache in _named(found, ".window").values() if cache["is_prefix_cacheable"]]
    pages = math.ceil((SLIDING_WINDOW - 1) / WINDOW_BLOCK)
    assert cost.growing_bytes_per_token == BYTES_PER_TOKEN
    assert cost.window_bytes_per_boundary == sum(cache["page_bytes"] * pages for cache in kept)
    blocks = len({cache["group"] for cache in kept}) * pages  # every group takes blocks of its own from the pool
    assert cost.pool_bytes_per_boundary == blocks * found["pool_bytes"] // found["num_blocks"]
    assert all(cache["block_size"] == WINDOW_BLOCK for cache in kept)


@pytest.mark.parametrize("policy", [EncoderPolicy(), SEGMENT], ids=str)
def test_a_plan_for_a_cluster_counts_the_groups_of_vllms_plan(
    policy: EncoderPolicy, plan: dict[str, Any], segment_plan: dict[str, Any]
) -> None:
    found = plan if policy == EncoderPolicy() else segment_plan
    pool = KVPool.of(ModelConfig.from_dict(released_config_dict()), 0, ReplaySettings(encoder=policy))
    windows = {cache["group"] for cache in _named(found, ".window").values()}
    growing = {cache["group"] for cache in found["caches"] if cache["kind"] == "MLAAttentionSpec"}
    rings = {cache["group"] for cache in found["caches"]} - windows - growing
    assert (pool.window_groups, pool.ring_groups) == (len(windows), len(rings))
    assert pool.block_bytes == found["pool_bytes"] // found["num_blocks"]


def test_no_two_caches_of_a_group_overlap_in_a_block(plan: dict[str, Any]) -> None:
    for group in {cache["group"] for cache in plan["caches"]}:
        places = sorted((c["offset"], c["offset"] + c["page_bytes"]) for c in plan["caches"] if c["group"] == group)
        assert places[-1][1] <= BYTES_PER_TOKEN * BLOCK_SIZE
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def test_windows_fill_the_blocks_of_the_pool(tmp_path: Path) -> None:
    plan = _plan(tmp_path, {ENCODER_VARIABLE: str(SEGMENT)}, SMALL)
    width = BLOCK_SIZE * (COMPRESSED_BYTES + INDEX_BYTES) * 3 // 2
    assert plan["pool_bytes"] / plan["num_blocks"] == width
    per_group = Counter(cache["group"] for cache in _named(plan, ".window").values())
    assert sorted(per_group.values()) == [4, 4]  # 16,896 bytes a page
