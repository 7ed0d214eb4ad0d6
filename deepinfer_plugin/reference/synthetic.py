"""A checkpoint of any size with arbitrary bytes, written without holding it: for measurements of loading.

The names, shapes and dtypes are those of a real checkpoint, of a model like ``tiny`` with wider layers and as many
experts as the size asks for. The values mean nothing: scales may be NaN, and the model must not be run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.shards import DTYPE_NAMES
from deepinfer_plugin.model.tensors import TensorSpec, expected_tensors
from deepinfer_plugin.reference.tiny_config import config_dict
from deepinfer_plugin.reference.tiny_tensors import SeededSource

_WIDTHS = {"hidden_size": 1024, "moe_intermediate_size": 1024, "q_lora_rank": 256, "o_lora_rank": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCheckpoint:
    """What was written, in bytes of tensor data."""

    config: ModelConfig
    total_bytes: int
    largest_shard_bytes: int
    num_shards: int


def synthetic_config(target_bytes: int) -> dict[str, Any]:
    """config.json of a model whose checkpoint has about ``target_bytes``, at least 150 MB."""
    config_json = config_dict("tiny")
    text = config_json["text_config"]
    text.update(_WIDTHS, n_routed_experts=text["num_experts_per_tok"])
    fixed = _total_bytes(expected_tensors(ModelConfig.from_dict(config_json)))
    text["n_routed_experts"] += 1
    per_expert = _total_bytes(expected_tensors(ModelConfig.from_dict(config_json))) - fixed
    text["n_routed_experts"] += max(0, (target_bytes - fixed) // per_expert - 1)
    return config_json


def tensor_bytes(name: str, num_bytes: int) -> memoryview:
    """The arbitrary bytes of a tensor: a function of its name and size."""
    return memoryview(SeededSource(0).words(name, -(-num_bytes // 8))).cast("B")[:num_bytes]


def write_synthetic(out: Path, target_bytes: int, num_shards: int) -> SyntheticCheckpoint:
    """Write config.json, the shards and their index; one tensor in memory at a time.

    Args:
        out: an existing folder.
        target_bytes: size of all tensors together, roughly.
        num_shards: shards of nearly equal size.
    """
    config_json = synthetic_config(target_bytes)
    config = ModelConfig.from_dict(config_json)
    specs = expected_tensors(config)
    total = _total_bytes(specs)
    shards: list[dict[str, TensorSpec]] = [{} for _ in range(num_shards)]
    begin = 0
    for name, spec in specs.items():
        shards[begin * num_shards // total][name] = spec
        begin += _num_bytes(spec)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        _write_shard(out / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
    return SyntheticCheckpoint(
        config=config,
        total_bytes=total,
        largest_shard_bytes=max(map(_total_bytes, shards)),
        num_shards=num_shards,
    )


def _write_shard(path: Path, specs: dict[str, TensorSpec]) -> None:
    # The header is padded and wide dtypes come first, so that every tensor is aligned for readers that map the file.
    names = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        spec, end = specs[name], begin + _num_bytes(specs[name])
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(tensor_bytes(name, _num_bytes(specs[name])))


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _total_bytes(specs: dict[str, TensorSpec]) -> int:
    return sum(map(_num_bytes, specs.values()))
