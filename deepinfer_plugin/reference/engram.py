"""Engram n-gram memory of one layer (spec §2.9). Images are known by their spans, not by the id of a token."""

from __future__ import annotations

import torch

from deepinfer_kernels.engram_gate import engram_gate
from deepinfer_kernels.engram_hash import EngramLayerHash, engram_rows
from deepinfer_kernels.engram_lookup import engram_lookup
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.cache import RequestCache
from deepinfer_plugin.reference.step import Parameters, Step


class ReferenceEngram:
    """Table, projection and gate of one Engram layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        layer_hash: EngramLayerHash,
        token_map: torch.Tensor,
        parameters: Parameters,
    ) -> None:
        self.config = config
        self.layer = layer
        self.token_map = token_map
        self.parameters = parameters
        device = token_map.device
        self.multipliers = torch.tensor(layer_hash.multipliers, dtype=torch.int64, device=device)
        self.primes = torch.tensor(layer_hash.primes, dtype=torch.int64, device=device)
        self.offsets = torch.tensor(layer_hash.offsets, dtype=torch.int64, device=device)

    def __call__(self, streams: torch.Tensor, step: Step, cache: RequestCache) -> torch.Tensor:
        """Add the memory of the last n-grams to streams [num_tokens, hc_mult, hidden_size]."""
        config, parameters = self.config, self.parameters
        rows = engram_rows(self.compressed_ids(step, cache), self.multipliers, self.primes, self.offsets)
        step.record(f"engram_rows.L{self.layer}", rows)
        memory = engram_lookup(
            parameters["embed.weight"], parameters["embed.scale"], rows, parameters.arithmetic.activation_dtype
        )
        key_value = parameters.quantized_linear("wkv", memory)
        num_keys = config.hc_mult * config.hidden_size  # the keys of all streams come first, then the one value
        return engram_gate(
            streams,
            key_value[:, :num_keys].reshape(streams.shape),
            key_value[:, num_keys:].contiguous(),
            parameters["q_weight"],
            parameters["k_weight"],
            config.rms_norm_eps,
            step.is_image,
        )

    def compressed_ids(self, step: Step, cache: RequestCache) -> torch.Tensor:
        """Compressed ids of each token and the ones before it, int64 [num_tokens, engram_max_ngram_size].

        Column s is the token s positions back. The pad token stands before the start of the sequence, and from the
        first image on that a walk back from the token meets.
        """
        back = torch.arange(self.config.engram_max_ngram_size, device=cache.tokens.device)
        source = step.positions[:, None] - back  # [num_tokens, engram_max_ngram_size]
        is_blocked = (source < 0) | cache.is_image[source.clamp_min(0)]
        is_blocked = is_blocked.long().cumsum(dim=1) > 0
        tokens = torch.where(is_blocked, self.config.engram_pad_token_id, cache.tokens[source.clamp_min(0)])
        return self.token_map[tokens]
