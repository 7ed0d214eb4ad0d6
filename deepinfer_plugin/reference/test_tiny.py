"""The small checkpoints: the same bytes as the ones the golden data belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_kernels.testing import require_golden
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.tensors import expected_tensors
from deepinfer_plugin.reference.synthetic import synthetic_config, tensor_bytes, write_synthetic
from deepinfer_plugin.reference.tiny import content_hash, write_checkpoint

CHECKPOINTS = [("tiny", 0), ("tiny", 1), ("tiny", 2), ("nano", 0), ("nano", 1)]
PINNED = {
    ("tiny", 0): "4130f520a826984b6607d613d478b0ae17f4a2d731d9aba0963d748dc3b469a3",
    ("nano", 0): "68163115d64722536fb83cbfa0fc4f591935d72db27b22fa2369e2d706fba9f8",
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize(("name", "seed"), CHECKPOINTS)
def test_the_content_hash_is_that_of_the_golden_data(name: str, seed: int, tmp_path: Path) -> None:
    manifest = json.loads(require_golden("manifest.json").read_text(encoding="utf-8"))
    entry = next(item for item in manifest["checkpoints"] if (item["config"], item["seed"]) == (name, seed))
    assert write_checkpoint(name, seed, tmp_path) == entry["sha256"]
    assert len(stored(tmp_path)) == entry["tensors"]


@pytest.mark.parametrize(("name", "seed"), sorted(PINNED))
def test_the_files_hold_the_pinned_content(name: str, seed: int, checkpoint: Callable[..., Path]) -> None:
    assert content_hash(stored(checkpoint(name, seed))) == PINNED[name, seed]


def test_the_hash_tells_every_part_of_a_tensor_apart() -> None:
    base = {"a": torch.arange(6, dtype=torch.int8)}
    others = [
        {"b": base["a"]},
        {"a": base["a"].view(torch.uint8)},
        {"a": base["a"].reshape(2, 3)},
        {"a": base["a"].flip(0)},
    ]
    assert len({content_hash(tensors) for tensors in (base, *others)}) == 5


def test_swiglu_limit_changes_the_configuration_and_no_weight(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    assert write_checkpoint("nano", 0, tmp_path, swiglu_limit=0.5) == PINNED["nano", 0]
    assert ModelConfig.from_model_dir(tmp_path).swiglu_limit == 0.5
    assert ModelConfig.from_model_dir(checkpoint("nano", 0)).swiglu_limit == 10.0


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_the_tokenizer_has_every_id_and_reads_back_what_it_wrote(name: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(name, 0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = ModelConfig.from_model_dir(folder)
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == config.image_token_id
    text = "the answer is 42 — naïve?"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name is 'huge', expected one of deep, nano, slice, tiny, wide;"):
        write_checkpoint("huge", 0, tmp_path)


def test_a_synthetic_checkpoint_has_the_size_and_the_bytes_it_names(tmp_path: Path) -> None:
    written = write_synthetic(tmp_path, 150_000_000, 3)
    assert abs(written.total_bytes - 150_000_000) < 30_000_000
    tensors = stored(tmp_path)
    specs = expected_tensors(written.config)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    for name, tensor in tensors.items():
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == tensor_bytes(name, tensor.nbytes), name


def test_a_synthetic_configuration_follows_the_size_it_is_given() -> None:
    small, large = (synthetic_config(size)["text_config"]["n_routed_experts"] for size in (200_000_000, 2_000_000_000))
    assert small < large
