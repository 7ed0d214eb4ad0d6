"""Name, shape and dtype of every tensor of a checkpoint.

Source: TC, the checkpoint's tensor contract; REF for what each tensor is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer_plugin.model.config import ModelConfig, VisionConfig

Group = Literal["text", "draft", "vision"]

SCALE_BLOCK = 32  # rows and columns of an MXFP8 weight, and columns of an MXFP4 weight, that share one scale
HC_SCALES = 3  # one factor each for pre, post and the stream-to-stream matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the checkpoint must hold under one name.

    ``dtype`` is the dtype on disk: packed MXFP4 is int8 with two columns per byte, the even one in the low nibble;
    scales are float8_e8m0fnu and are handed on as their bytes, uint8. ``group`` says which part of the model reads it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint of ``config``, by name, in the order of the forward pass.

    Names have no ``model.`` prefix. 96,085 tensors for the released configuration.
    """
    table = _Table("text")
    width, vocab = config.hidden_size, config.vocab_size
    table.bf16("embed.weight", vocab, width)
    for layer in range(config.num_hidden_layers):
        _block(table, f"layers.{layer}.", config, config.n_routed_experts)
        _compressed_attention(table, f"layers.{layer}.attn.", config, layer)
        _engram(table, f"layers.{layer}.engram.", config, layer)
    table.bf16("norm.weight", width)
    table.bf16("head.weight", vocab, width)

    table.group = "draft"
    for block in range(config.num_nextn_predict_layers):
        _block(table, f"mtp.{block}.", config, config.dspark_n_routed_experts)
    if config.num_nextn_predict_layers:
        _draft_heads(table, config)

    table.group = "vision"
    if config.vision_config is not None:
        _vision(table, config.vision_config, width)
    return table.specs


class _Table:
    """The specs so far; one method per number format."""

    def __init__(self, group: Group) -> None:
        self.group: Group = group
        self.specs: dict[str, TensorSpec] = {}

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.specs[name] = TensorSpec(shape=shape, dtype=dtype, group=self.group)

    def bf16(self, name: str, *shape: int) -> None:
        self._add(name, shape, torch.bfloat16)

    def fp32(self, name: str, *shape: int) -> None:
        self._add(name, shape, torch.float32)

    def mxfp8(self, prefix: str, rows: int, columns: int) -> None:
        """A linear weight with one scale per 32 x 32 block."""
        self._add(f"{prefix}.weight", (rows, columns), torch.float8_e4m3fn)
        self._add(f"{prefix}.scale", (-(-rows // SCALE_BLOCK), columns // SCALE_BLOCK), torch.float8_e8m0fnu)

    def mxfp8_rows(self, prefix: str, rows: int, columns: int) -> None:
        """A table that is read by row: one scale per 32 columns of a row."""
        self._add(f"{prefix}.weight", (rows, columns), torch.float8_e4m3fn)
        self._add(f"{prefix}.scale", (rows, columns // SCALE_BLOCK), torch.float8_e8m0fnu)

    def mxfp4(self, prefix: str, rows: int, columns: int) -> None:
        """An expert weight, two columns per byte, one scale per 32 columns of a row."""
        self._add(f"{prefix}.weight", (rows, columns // 2), torch.int8)
        self._add(f"{prefix}.scale", (rows, columns // SCALE_BLOCK), torch.float8_e8m0fnu)


def _block(table: _Table, prefix: str, config: ModelConfig, experts: int) -> None:
    """What a backbone layer and a draft block share."""
    width, mixes = config.hidden_size, config.num_hc_mixes
    table.bf16(f"{prefix}attn_norm.weight", width)
    table.bf16(f"{prefix}ffn_norm.weight", width)
    for half in ("attn", "ffn"):
        table.fp32(f"{prefix}hc_{half}_fn", mixes, config.hc_mult * width)
        table.fp32(f"{prefix}hc_{half}_base", mixes)
        table.fp32(f"{prefix}hc_{half}_scale", HC_SCALES)

    attn, heads, head_dim = f"{prefix}attn.", config.num_attention_heads, config.head_dim
    low_rank = config.o_groups * config.o_lora_rank
    table.fp32(f"{attn}attn_sink", heads)
    table.bf16(f"{attn}q_norm.weight", config.q_lora_rank)
    table.bf16(f"{attn}kv_norm.weight", head_dim)
    table.mxfp8(f"{attn}wq_a", config.q_lora_rank, width)
    table.mxfp8(f"{attn}wq_b", heads * head_dim, config.q_lora_rank)
    table.mxfp8(f"{attn}wkv", head_dim, width)
    table.mxfp8(f"{attn}wo_a", low_rank, heads * head_dim // config.o_groups)
    table.mxfp8(f"{attn}wo_b", width, low_rank)

    ffn, inter = f"{prefix}ffn.", config.moe_intermediate_size
    table.bf16(f"{ffn}gate.weight", experts, width)
    table.fp32(f"{ffn}gate.bias", experts)
    if config.vision_config is not None:  # the router's bias at image tokens; draft blocks carry it without using it
        table.fp32(f"{ffn}gate.bias_vl", experts)
    for expert in range(experts):
        table.mxfp4(f"{ffn}experts.{expert}.w1", inter, width)
        table.mxfp4(f"{ffn}experts.{expert}.w3", inter, width)
        table.mxfp4(f"{ffn}experts.{expert}.w2", width, inter)
    table.mxfp8(f"{ffn}shared_experts.w1", inter, width)
    table.mxfp8(f"{ffn}shared_experts.w3", inter, width)
    table.mxfp8(f"{ffn}shared_experts.w2", width, inter)


def _compressed_attention(table: _Table, attn: str, config: ModelConfig, layer: int) -> None:
    width, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    if config.is_kv_source(layer):
        table.bf16(f"{attn}compressor.wkv.weight", head_dim, width)
        if config.ratio(layer) == 2:  # pooling two tokens needs their scores
            table.bf16(f"{attn}compressor.wgate.weight", head_dim, width)
        table.bf16(f"{attn}compressor.norm.weight", head_dim)
        table.bf16(f"{attn}indexer.wk.weight", index_dim, head_dim)
        table.bf16(f"{attn}indexer.k_norm.weight", index_dim)
    if config.is_index_source(layer):
        table.mxfp8(f"{attn}indexer.wq_b", config.index_n_heads * index_dim, config.q_lora_rank)
        table.bf16(f"{attn}indexer.weights_proj.weight", config.index_n_heads, width)


def _engram(table: _Table, engram: str, config: ModelConfig, layer: int) -> None:
    index = config.engram_index(layer)
    if index is None:
        return
    width, streams = config.hidden_size, config.hc_mult
    table.mxfp8_rows(f"{engram}embed", config.engram_num_embeddings[index], config.engram_head_dim)
    table.mxfp8(f"{engram}wkv", (streams + 1) * width, config.num_engram_columns * config.engram_head_dim)
    table.bf16(f"{engram}q_weight", streams, width)
    table.bf16(f"{engram}k_weight", streams, width)


def _draft_heads(table: _Table, config: ModelConfig) -> None:
    width, rank, vocab = config.hidden_size, config.dspark_markov_rank, config.vocab_size
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    table.mxfp8("mtp.0.main_proj", width, len(config.dspark_target_layer_ids) * width)
    table.bf16("mtp.0.main_norm.weight", width)
    table.bf16(f"{last}norm.weight", width)
    table.bf16(f"{last}markov_head.embed.weight", vocab, rank)
    table.bf16(f"{last}markov_head.head.weight", vocab, rank)
    table.bf16(f"{last}confidence_head.proj.weight", 1, width + rank)


def _vision(table: _Table, vision: VisionConfig, text_width: int) -> None:
    width, inter = vision.hidden_size, vision.intermediate_size

    def affine(prefix: str, rows: int, columns: int) -> None:
        table.bf16(f"{prefix}.weight", rows, columns)
        table.bf16(f"{prefix}.bias", rows)

    affine("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        table.bf16(f"{prefix}norm1.weight", width)
        table.bf16(f"{prefix}norm2.weight", width)
        affine(f"{prefix}attn.wqkv", 3 * width, width)
        affine(f"{prefix}attn.wo", width, width)
        table.bf16(f"{prefix}mlp.w1.weight", 2 * inter, width)
        table.bf16(f"{prefix}mlp.w2.weight", width, inter)
    table.bf16("vision.norm.weight", width)
    affine("aligner.w1", text_width, width * vision.downsample_ratio**2)
    affine("aligner.w2", text_width, text_width)
    for name in ("image_start", "image_newline", "image_end"):
        table.bf16(name, text_width)
