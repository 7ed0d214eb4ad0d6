"""The draft blocks in plain PyTorch (spec §4): context KV from taps, block attention, Markov and confidence heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.linear import linear
from deepinfer_kernels.rope import rope
from deepinfer_kernels.sparse_attention import sparse_attention
from deepinfer_kernels.swa_indices import window_slots
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.reference.attention import ReferenceAttention
from deepinfer_plugin.reference.cache import RequestCache, new_request_cache
from deepinfer_plugin.reference.model import ReferenceModel
from deepinfer_plugin.reference.moe import ReferenceMoe
from deepinfer_plugin.reference.step import Parameters, Rotation, Step
from deepinfer_plugin.settings import Arithmetic


def load_draft_weights(model_dir: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of the draft blocks and the two that they share with the text model; byte formats become uint8."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        for name, tensor in load_file(shard, device=str(device)).items():
            if name.startswith(("mtp.", "embed.", "head.")):
                is_bytes = tensor.dtype in (torch.float8_e8m0fnu, torch.int8)
                weights[name] = tensor.view(torch.uint8) if is_bytes else tensor
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One pass of the drafter.

    tokens: [num_drafts] int64; logits: [num_drafts, vocab_size] fp32; confidence: [num_drafts] fp32, no sigmoid.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


class DraftAttention(ReferenceAttention):
    """Every row attends to the window of context before the block and to all rows of the block (spec §4.3)."""

    def __call__(self, x: torch.Tensor, step: Step, cache: RequestCache) -> torch.Tensor:
        """As of a backbone layer; the block's own records are overwritten by the context that takes their place."""
        rotation = self.rotation(step.positions)
        query_latent = self.parameters.norm("q_norm", self.parameters.quantized_linear("wq_a", x))
        query = self.parameters.quantized_linear("wq_b", query_latent)
        query = query.view(x.shape[0], self.config.num_attention_heads, self.config.head_dim)
        self.write_window(x, rotation, step, cache)
        return self.project(self.attend(rope(query, *rotation), rotation, step, cache))

    def attend(self, query: torch.Tensor, rotation: Rotation, step: Step, cache: RequestCache) -> torch.Tensor:
        """The context first, ascending, in ``sliding_window`` slots, then the block."""
        config, num_rows = self.config, query.shape[0]
        last = (step.positions[:1] - 1).expand(num_rows).contiguous()
        context = window_slots(
            last, step.req_idx, cache.block_table, cache.capacity, config.sliding_window, torch.zeros_like(last)
        )
        return sparse_attention(
            query,
            cache.window[self.layer],
            torch.cat((context, step.positions.expand(num_rows, num_rows)), dim=1),
            None,
            None,
            self.parameters["attn_sink"],
            config.head_dim**-0.5,
            window_format=self.arithmetic.window_format,
            compressed_format=self.arithmetic.compressed_format,
            round_p=self.arithmetic.is_exact_bf16,
            cos=rotation[0],
            sin=rotation[1],
        )


class ReferenceDrafter(ReferenceModel):
    """The draft blocks of one request at a time. ``block``, ``mix`` and ``embed`` are those of the text model."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], arithmetic: Arithmetic) -> None:
        """Build the blocks around ``weights``, as ``load_draft_weights`` returns them."""
        self.config, self.arithmetic = config, arithmetic
        self.parameters = Parameters(tensors=weights, prefix="", arithmetic=arithmetic, eps=config.rms_norm_eps)
        self.device = weights["embed.weight"].device
        self.num_blocks = config.num_nextn_predict_layers
        experts = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        first, blocks = config.num_hidden_layers, range(self.num_blocks)
        self.attention = [DraftAttention(config, first + i, self._layer(i).under("attn.")) for i in blocks]
        self.moe = [ReferenceMoe(experts, first + i, self._layer(i).under("ffn.")) for i in blocks]

    def _layer(self, layer: int) -> Parameters:
        return self.parameters.under(f"mtp.{layer}.")

    def new_cache(self, capacity: int) -> RequestCache:
        """Context KV of a request of at most ``capacity`` tokens, drafts included."""
        cache = new_request_cache(self.config, self.arithmetic, capacity, self.device)
        pages = cache.window.values()
        cache.window = {a.layer: page for a, page in zip(self.attention, pages, strict=False)}
        return cache

    @torch.inference_mode()
    def store_context(self, main_hidden: torch.Tensor, positions: torch.Tensor, cache: RequestCache) -> None:
        """Keep what drafts read of verified tokens (spec §4.2).

        Args:
            main_hidden: [num_tokens, num_taps * hidden_size], the text model's taps side by side.
            positions: [num_tokens] int64.
            cache: of the request.
        """
        first = self._layer(0)
        context = first.norm("main_norm", first.quantized_linear("main_proj", main_hidden))
        step = self.new_step(positions)
        for attention in self.attention:
            attention.write_window(context, attention.rotation(positions), step, cache)

    @torch.inference_mode()
    def draft(self, anchor: int, last: int, num_drafts: int, cache: RequestCache) -> Draft:
        """Draft greedily behind the token ``anchor`` at position ``last + 1``.

        Args:
            anchor: the token sampled at the last verified position.
            last: the last verified position; its context and that of the window before it are stored.
            num_drafts: rows of the block.
            cache: of the request.
        """
        ids = torch.full((num_drafts,), self.config.dspark_noise_token_id, device=self.device)
        ids[0] = anchor
        step = self.new_step(torch.arange(last + 1, last + 1 + num_drafts, device=self.device))
        streams, pre = self.embed(ids)
        for block in range(self.num_blocks):
            streams, pre = self.block(block, streams, pre, step, cache)
        return self._sample(hc_collapse(streams, pre), anchor)

    def _sample(self, hidden: torch.Tensor, anchor: int) -> Draft:
        """Markov and confidence heads, one row after the other (spec §4.4, §4.5)."""
        heads = self._layer(self.num_blocks - 1)
        base = linear(heads.norm("norm", hidden), self.parameters["head.weight"], out_dtype=torch.float32)
        tokens, logits, confidence = [], [], []
        previous = torch.tensor([anchor], device=self.device)
        for row in range(hidden.shape[0]):
            embedded = heads["markov_head.embed.weight"][previous].to(self.arithmetic.activation_dtype)
            scores = base[row : row + 1] + linear(embedded, heads["markov_head.head.weight"], out_dtype=torch.float32)
            features = torch.cat((hidden[row : row + 1], embedded), dim=1)
            confidence.append(linear(features, heads["confidence_head.proj.weight"], out_dtype=torch.float32)[:, 0])
            previous = scores.argmax(dim=-1)
            tokens.append(previous)
            logits.append(scores)
        return Draft(tokens=torch.cat(tokens), logits=torch.cat(logits), confidence=torch.cat(confidence))
