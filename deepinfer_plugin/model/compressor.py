"""Compressor of a KV source: one latent entry per ``ratio`` tokens, stored packed for the layers that read it."""

import torch

from deepinfer_kernels.kv_compress import compress_pairs
from deepinfer_kernels.kv_store import store_records
from deepinfer_kernels.rope import rope
from deepinfer_plugin.cache.layers import CacheLayer
from deepinfer_plugin.cache.specs import entry_spec, pair_state_spec
from deepinfer_plugin.model.context import BuildContext
from deepinfer_plugin.model.linear import PlainLinear, RMSNorm, TensorModule
from deepinfer_plugin.model.step import Step


class Compressor(TensorModule):
    """Latents of a KV-source layer.

    ``entries`` holds the rotated, quantised latents that attention reads. The unrotated latent feeds the index keys.
    """

    def __init__(self, context: BuildContext, layer: int, prefix: str) -> None:
        super().__init__()
        config, records = context.config, context.records
        self.ratio = config.compress_ratios[layer]
        self.format = records.compressed_format
        self.wkv = PlainLinear(config.head_dim, config.hidden_size)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.entries = CacheLayer(
            context.vllm_config,
            f"{prefix}.entries",
            entry_spec(context.vllm_config, records.compressed_bytes, self.ratio),
        )
        if self.ratio == 2:
            self.wgate = PlainLinear(config.head_dim, config.hidden_size)
            self.pair_state = CacheLayer(
                context.vllm_config, f"{prefix}.pair_state", pair_state_spec(context.vllm_config, records)
            )

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Store the entries that close in this step.

        Args:
            x: [num_tokens, hidden_size], attn-normed.
            step: the batch.

        Returns:
            [num_tokens, head_dim] latents before rotation; a row whose group is still open has no meaning.
        """
        latent = self.norm(self._pool(x, step))
        rotation = step.entry_rotation(self.ratio)
        slots = step.entry_write_slots(self.entries.metadata(step.attn_metadata), self.ratio)
        rotated = rope(latent, rotation.cos, rotation.sin)
        store_records(self.entries.kv_cache, slots, rotated, self.format)
        return latent

    def _pool(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        if self.ratio == 1:
            return self.wkv(x)
        state = self.pair_state.metadata(step.attn_metadata)
        return compress_pairs(
            self.wkv(x, torch.float32),
            self.wgate(x, torch.float32),
            step.positions,
            step.req_idx,
            self.pair_state.kv_cache,
            state.block_table[:, 0],
            out_dtype=x.dtype,
        )
