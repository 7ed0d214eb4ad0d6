"""Modules that own a KV cache. vLLM finds them by name, plans their memory and binds it to them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from deepinfer_plugin.cache.metadata import CacheMetadata, DeepInferCacheBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


class CacheLayer(nn.Module, AttentionLayerBase):
    """Owns one cache of one layer.

    Attributes:
        kv_cache: [num_blocks, states_per_block, record] uint8, or fp32 for a pair ring; bound by vLLM.
    """

    supports_dcp = False

    def __init__(self, vllm_config: "VllmConfig", prefix: str, spec: "KVCacheSpec") -> None:
        super().__init__()
        self.prefix = prefix
        self.spec = spec
        self.kv_cache = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"CacheLayer: prefix is {prefix!r}, expected a name that no other layer has")
        layers[prefix] = self

    def get_attn_backend(self) -> type[DeepInferCacheBackend]:
        return DeepInferCacheBackend

    def get_kv_cache_spec(self, vllm_config: "VllmConfig") -> "KVCacheSpec":
        del vllm_config
        return self.spec

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's view [num_blocks, 1, states_per_block, record] without its head axis."""
        self.kv_cache = kv_cache.squeeze(1)

    def metadata(self, attn_metadata: Mapping[str, CacheMetadata]) -> CacheMetadata:
        """This cache's part of the step's metadata."""
        return attn_metadata[self.prefix]
