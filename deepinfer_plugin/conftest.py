"""Fixtures of the plugin's tests: small checkpoints, written once per session, reference models, and the environment.

Imports are inside the fixtures: a test that needs no model pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from deepinfer_plugin.reference.golden import Checkpoint
    from deepinfer_plugin.reference.model import ReferenceModel
    from deepinfer_plugin.settings import Arithmetic

CheckpointFixture = Callable[..., Path]
ModelFixture = Callable[..., "ReferenceModel"]
WeightsFixture = Callable[["Checkpoint"], "dict[str, torch.Tensor]"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFixture:
    """``checkpoint("tiny", 0)`` or ``checkpoint("tiny", 0, 0.5)``: folder of a small checkpoint, written on first use.

    The folder is shared by the session: copy it before changing a file.
    """
    from deepinfer_plugin.reference.tiny import write_checkpoint

    folders: dict[tuple[str, int, float | None, bool], Path] = {}

    def write(name: str, seed: int, swiglu_limit: float | None = None, *, drafts_agree: bool = False) -> Path:
        key = (name, seed, swiglu_limit, drafts_agree)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{name}-s{seed}-")
            write_checkpoint(name, seed, folders[key], swiglu_limit, drafts_agree=drafts_agree)
        return folders[key]

    return write


@pytest.fixture(scope="session")
def text_weights(checkpoint: CheckpointFixture) -> WeightsFixture:
    """Tensors of the text model of a small checkpoint, one copy per session; not to be written to."""
    from deepinfer_plugin.reference.model import load_text_weights

    loaded: dict[Checkpoint, dict[str, torch.Tensor]] = {}

    def load(key: Checkpoint) -> dict[str, torch.Tensor]:
        if key not in loaded:
            loaded[key] = load_text_weights(checkpoint(key.name, key.seed, key.swiglu_limit))
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def reference_model(checkpoint: CheckpointFixture, text_weights: WeightsFixture) -> ModelFixture:
    """``reference_model(Checkpoint("tiny", 0), Arithmetic.S32)``, built on first use; it keeps nothing of a request."""
    from deepinfer_plugin.model.config import ModelConfig
    from deepinfer_plugin.reference.model import ReferenceModel

    models: dict[tuple[Checkpoint, Arithmetic], ReferenceModel] = {}

    def build(key: Checkpoint, arithmetic: Arithmetic) -> ReferenceModel:
        if (key, arithmetic) not in models:
            config = ModelConfig.from_model_dir(checkpoint(key.name, key.seed, key.swiglu_limit))
            models[key, arithmetic] = ReferenceModel(config, text_weights(key), arithmetic)
        return models[key, arithmetic]

    return build


@pytest.fixture
def vllm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM picks our platform on its first import, and that sets these variables: they are restored afterwards."""
    from deepinfer_plugin import envs

    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, envs.child_environment().get(name, "1" if name != "CUDA_VISIBLE_DEVICES" else ""))
