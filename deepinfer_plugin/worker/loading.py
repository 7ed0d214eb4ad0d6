"""Our reader of checkpoints as a load format of vLLM: every rank reads its own rows of the files and nothing else."""

import time
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import nn
from vllm.config import ModelConfig as EngineModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.weights import ALL_GROUPS, ALONE, iterate_tensors
from deepinfer_plugin.platforms.served import LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class DeepInferModelLoader(DefaultModelLoader):
    """vLLM finds or downloads the files; we read them."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: EngineModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Names and rows for a model; one that does not say which parts it wants gets every tensor, whole."""
        folder, *_ = self._prepare_weights(model_config.model, None, model_config.revision, False, None)
        self.counter_before_loading_weights = time.perf_counter()  # vLLM reports the time from here
        yield from iterate_tensors(
            folder,
            ModelConfig.from_hf(model_config.hf_config),
            getattr(model, "checkpoint_groups", ALL_GROUPS),
            getattr(model, "parallel", ALONE),
        )
