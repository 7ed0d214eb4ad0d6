"""The whole text model in plain PyTorch on a contiguous cache (spec §2.1, §2.2): the oracle of the project.

It runs any chunking of a prompt, down to single tokens, in the three arithmetics of golden/README.md §2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer_kernels.engram_hash import engram_layout
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.hc_sinkhorn import hc_sinkhorn
from deepinfer_kernels.linear import linear
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.attention import ReferenceAttention
from deepinfer_plugin.reference.cache import RequestCache, new_request_cache
from deepinfer_plugin.reference.engram import ReferenceEngram
from deepinfer_plugin.reference.moe import ReferenceMoe
from deepinfer_plugin.reference.step import Parameters, Step, Trace
from deepinfer_plugin.settings import Arithmetic

Mix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # pre [T, S], post [T, S], comb [T, S, S], fp32


def load_text_weights(model_dir: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Read the tensors of the text model as they lie in the checkpoint; byte formats become uint8.

    Args:
        model_dir: folder with the safetensors shards.
        device: where the tensors go.

    Returns:
        Checkpoint name to tensor, without the draft blocks (``mtp.``) and the vision tower.
    """
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        for name, tensor in load_file(shard, device=str(device)).items():
            if name.startswith(("layers.", "embed.", "norm.", "head.")):
                is_bytes = tensor.dtype in (torch.float8_e8m0fnu, torch.int8)
                weights[name] = tensor.view(torch.uint8) if is_bytes else tensor
    return weights


def load_vision_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of the image tower, the aligner and the delimiters: checkpoint name to tensor."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        found = load_file(shard)
        weights |= {name: found[name] for name in found if name.startswith(("vision.", "aligner.", "image_"))}
    return weights


class ReferenceModel:
    """DeepSeek-V4.1 text model, one request at a time."""

    attention_class: type[ReferenceAttention] = ReferenceAttention

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        arithmetic: Arithmetic,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """Build the layers around ``weights``, which are not copied (experts are stacked).

        Args:
            config: the checked configuration.
            weights: checkpoint name to tensor, as ``load_text_weights`` returns them.
            arithmetic: rounding and fake quantisation.
            token_map: [vocab_size] int, the Engram token compression. Left out only where the compressed vocabulary
                is the vocabulary, as in the small checkpoints: there it is the identity.

        Raises:
            ConfigError: ``token_map`` is missing or has another length than the vocabulary.
        """
        self.config = config
        self.arithmetic = arithmetic
        self.parameters = Parameters(tensors=weights, prefix="", arithmetic=arithmetic, eps=config.rms_norm_eps)
        self.device = weights["embed.weight"].device
        if token_map is None and config.engram_compressed_vocab_size == config.vocab_size:
            token_map = torch.arange(config.vocab_size)
        if token_map is None or token_map.shape != (config.vocab_size,):
            raise ConfigError(
                f"ReferenceModel: token_map is {None if token_map is None else list(token_map.shape)}, expected "
                f"[{config.vocab_size}] ids below {config.engram_compressed_vocab_size}; "
                f"build it from the tokenizer of the checkpoint"
            )
        layers = range(config.num_hidden_layers)
        self.attention = [self.attention_class(config, i, self._layer(i).under("attn.")) for i in layers]
        self.moe = [ReferenceMoe(config, i, self._layer(i).under("ffn.")) for i in layers]
        self.engram = self._build_engram(token_map.to(self.device, torch.int64))

    def _layer(self, layer: int) -> Parameters:
        return self.parameters.under(f"layers.{layer}.")

    def _build_engram(self, token_map: torch.Tensor) -> dict[int, ReferenceEngram]:
        config = self.config
        layout = engram_layout(
            config.engram_layer_ids,
            config.engram_n_heads,
            config.engram_max_ngram_size,
            config.engram_vocab_size,
            config.engram_compressed_vocab_size,
        )
        return {
            i: ReferenceEngram(config, i, layout[i], token_map, self._layer(i).under("engram."))
            for i in config.engram_layer_ids
        }

    def new_cache(self, capacity: int) -> RequestCache:
        """The empty cache of a request of at most ``capacity`` tokens."""
        return new_request_cache(self.config, self.arithmetic, capacity, self.device)

    def prefill(self, tokens: torch.Tensor, trace: Trace | None = None) -> torch.Tensor:
        """Logits of every row of a prompt, fed in one piece; tokens [num_tokens] int, result fp32 [num_tokens, V]."""
        return self.forward(tokens, self.new_cache(max(tokens.shape[0], 1)), trace)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        cache: RequestCache,
        trace: Trace | None = None,
        *,
        encoder_floor: int = 0,
        entries_from: int = 0,
    ) -> torch.Tensor:
        """Feed the next tokens of a request.

        Args:
            tokens: [num_tokens] int, the ids after those already in ``cache``.
            cache: of this request, advanced in place.
            trace: filled with intermediate values under the names of golden/README.md §4, if given.
            encoder_floor: first window key that these rows may see in the encoder layers.
            entries_from: compressed KV and index keys of positions before it are left as they are.

        Returns:
            [num_tokens, vocab_size] fp32 logits.

        Raises:
            ShapeError: the request outgrows ``cache``.

        Invariance: bitwise per row; a row depends on the tokens before it, not on how they were cut into calls.
        Source: REF, class Transformer, with the repaired indexer rule of spec §2.7.
        """
        step = self.new_step(cache.append(tokens.to(self.device)), trace)
        step.encoder_floor, step.entries_from = encoder_floor, entries_from
        streams, pre = self._enter(tokens, step, cache)
        taps = []
        for layer in range(self.config.num_hidden_layers):
            if layer in self.engram:
                streams = self.engram[layer](streams, step, cache)
            if layer in self.config.dspark_target_layer_ids:
                taps.append(self.tap(streams))
            streams, pre = self.block(layer, streams, pre, step, cache)
        step.record("main_hidden", torch.cat(taps, dim=-1))
        return self.head(streams, pre)

    @torch.inference_mode()
    def replay_windows(self, cache: RequestCache, start: int) -> None:
        """Compute the encoder windows of the tokens from ``start`` on again, seeing only each other's window keys.

        Entries and decoder windows stay as they are.
        """
        end = cache.length
        tokens = cache.tokens[start:end].clone()
        cache.rewind(start)
        step = self.new_step(cache.append(tokens))
        step.encoder_floor, step.entries_from = start, end
        streams, pre = self._enter(tokens, step, cache)
        for layer in range(self.config.kv_source_layer_ids[-1]):
            if layer in self.engram:
                streams = self.engram[layer](streams, step, cache)
            streams, pre = self.block(layer, streams, pre, step, cache)

    def new_step(self, positions: torch.Tensor, trace: Trace | None = None) -> Step:
        """The shared state of one call on the tokens at ``positions``."""
        return Step(positions=positions, req_idx=torch.zeros_like(positions, dtype=torch.int32), trace=trace)

    def _enter(self, tokens: torch.Tensor, step: Step, cache: RequestCache) -> tuple[torch.Tensor, torch.Tensor]:
        """``embed`` with the rows of images in their places."""
        if cache.image_rows is None:
            return self.embed(tokens)
        step.is_image = cache.is_image[step.positions]
        streams, pre = self.embed(tokens)
        rows = cache.image_rows[step.positions].to(streams.dtype)[:, None]
        return torch.where(step.is_image[:, None, None], rows, streams), pre

    def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal streams [num_tokens, hc_mult, hidden_size] and the identity pre-mix [num_tokens, hc_mult]."""
        rows = self.parameters["embed.weight"][tokens.to(self.device, torch.int64)]
        streams = rows.to(self.arithmetic.activation_dtype)[:, None].repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(tokens.shape[0], self.config.hc_mult, device=self.device)
        pre[:, 0] = 1.0
        return streams, pre

    def mix(self, layer: int, half: str, streams: torch.Tensor, step: Step) -> Mix:
        """Hyper-connection coefficients that one sublayer computes from the streams before it."""
        parameters, config = self._layer(layer), self.config
        logits = hc_mix(streams, parameters[f"hc_{half}_fn"], config.rms_norm_eps)
        mix = hc_sinkhorn(
            logits,
            parameters[f"hc_{half}_scale"],
            parameters[f"hc_{half}_base"],
            iters=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
        )
        step.record(f"L{layer}.{half}.mix_logits", logits)
        for name, value in zip(("pre", "post", "comb"), mix, strict=True):
            step.record(f"L{layer}.{half}.{name}", value)
        return mix

    def block(
        self, layer: int, streams: torch.Tensor, pre: torch.Tensor, step: Step, cache: RequestCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer without its Engram (spec §2.2).

        Args:
            layer: which one; the layers it shares KV or selections with ran before in the same ``step``.
            streams: [num_tokens, hc_mult, hidden_size] activation dtype.
            pre: [num_tokens, hc_mult] fp32, the mix that the layer before computed for this attention.
            step: the call.
            cache: of the request.

        Returns:
            The new streams, and the mix that collapses them for the next layer.
        """
        parameters = self._layer(layer)
        attn_pre, attn_post, attn_comb = self.mix(layer, "attn", streams, step)
        attn_in = parameters.norm("attn_norm", hc_collapse(streams, pre))
        attn_out = self.attention[layer](attn_in, step, cache)
        streams = hc_post(attn_out, streams, attn_post, attn_comb)
        step.record(f"L{layer}.attn_in", attn_in)
        step.record(f"L{layer}.attn_out", attn_out)
        step.record(f"L{layer}.x_mid", streams)

        ffn_pre, ffn_post, ffn_comb = self.mix(layer, "ffn", streams, step)
        ffn_in = parameters.norm("ffn_norm", hc_collapse(streams, attn_pre))
        moe_out = self.moe[layer](ffn_in, step)
        streams = hc_post(moe_out, streams, ffn_post, ffn_comb)
        step.record(f"L{layer}.ffn_in", ffn_in)
        step.record(f"L{layer}.moe_out", moe_out)
        return streams, ffn_pre

    def tap(self, streams: torch.Tensor) -> torch.Tensor:
        """Mean of the streams in stream order, [num_tokens, hidden_size]: what the drafter reads of a layer."""
        total = streams[:, 0].float()
        for stream in range(1, self.config.hc_mult):
            total = total + streams[:, stream].float()
        return (total / self.config.hc_mult).to(streams.dtype)

    def head(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """Collapse with the last mix, norm, and project to fp32 logits."""
        hidden_states = self.parameters.norm("norm", hc_collapse(streams, pre))
        return linear(hidden_states, self.parameters["head.weight"], out_dtype=torch.float32)
