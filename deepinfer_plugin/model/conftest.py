"""Fixtures of the model's tests: the smallest checkpoint, as a folder that may be damaged and as tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from deepinfer_plugin.model.config import ModelConfig


@pytest.fixture
def nano_folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint ``nano``, seed 0, that a test may damage."""
    return Path(shutil.copytree(checkpoint("nano", 0), tmp_path / "nano"))


@pytest.fixture(scope="session")
def nano_config(checkpoint: Callable[..., Path]) -> ModelConfig:
    """The configuration of ``nano``."""
    from deepinfer_plugin.model.config import ModelConfig

    return ModelConfig.from_model_dir(checkpoint("nano", 0))


@pytest.fixture(scope="session")
def nano_tensors(checkpoint: Callable[..., Path]) -> dict[str, torch.Tensor]:
    """Every tensor of ``nano``, read by the safetensors library; not to be written to."""
    from safetensors.torch import load_file

    shards = sorted(checkpoint("nano", 0).glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
