"""Small random checkpoints in the released on-disk format, for tests and demonstrations.

The files depend on (name, seed) only, on every machine; the content hash pins them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.tiny_config import SIZES, config_dict
from deepinfer_plugin.reference.tiny_drafts import with_agreeing_drafts
from deepinfer_plugin.reference.tiny_tensors import make_tensors
from deepinfer_plugin.reference.tiny_tokenizer import tokenizer_files

NUM_SHARDS = 2


def write_checkpoint(
    name: str, seed: int, out: str | Path, swiglu_limit: float | None = None, *, drafts_agree: bool = False
) -> str:
    """Write config.json, two shards with their index, and the tokenizer.

    Args:
        name: "tiny" (10 layers, 4.8 M parameters), "nano" (7 layers, 0.9 M), "deep" (40 layers of tiny's width),
            "wide" (7 layers that eight ranks can share) or "slice" (5 layers of the released width, 3.4 G parameters,
            2.9 GB: half a minute on 16 cores, with 50 GB of memory on the way, and 8 GB where one core makes it).
        seed: of the weights; at least 0.
        out: folder, made if it is missing; files in it are overwritten.
        swiglu_limit: None for the released 10.0; 0.5 makes the clamps fire.
        drafts_agree: change the weights so that most drafts are right, see ``tiny_drafts``.

    Returns:
        The content hash of the tensors.

    Raises:
        ConfigError: there is no small model called ``name``.
    """
    if name not in SIZES:
        raise ConfigError(f"write_checkpoint: name is {name!r}, expected one of {', '.join(SIZES)}; choose one of them")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    config_json = config_dict(name, swiglu_limit)
    config = ModelConfig.from_dict(config_json)
    tensors = make_tensors(config, seed)
    if drafts_agree:
        tensors = with_agreeing_drafts(tensors, config)
    index = _write_shards(tensors, config.num_hidden_layers // NUM_SHARDS, folder)
    tokenizer, tokenizer_config = tokenizer_files(config.vocab_size, config.max_position_embeddings)
    _write_json(folder / "config.json", config_json)
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokens = {word: config_json[word] for word in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**tokens, "do_sample": True, "temperature": 1.0, "top_p": 1.0})
    return content_hash(tensors)


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write_shards(tensors: Mapping[str, torch.Tensor], cut: int, folder: Path) -> dict[str, Any]:
    """Write the embedding and the layers below ``cut`` into one shard, the rest into another; return the index."""
    first = ("embed.", *(f"layers.{layer}." for layer in range(cut)))
    weight_map: dict[str, str] = {}
    for number, is_first in enumerate((True, False), start=1):
        file_name = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        shard = {name: tensors[name] for name in sorted(tensors) if name.startswith(first) == is_first}
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    return {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
