"""What the fields of config.json must satisfy, alone and together.

Source: V41, attention.py and nvidia/model.py; REF, Transformer; the vendor's own checks where they say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_plugin.model.config import ModelConfig

# Fields of which one value is implemented.
_FIXED: dict[str, object] = {
    "dtype": "bfloat16",
    "text_config.num_key_value_heads": 1,
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0.0,
    "text_config.hidden_act": "silu",
    "text_config.tie_word_embeddings": False,
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "text_config.hc_mult": 4,
    "text_config.rope_scaling.rope_type": "yarn",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": (32, 32),
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
}
# Optional words of text_config that would select another forward pass; absent in the release.
_SWITCHES: dict[str, object] = {
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
    "gate_temp": 1.0,
    "num_hash_layers": 0,
}
_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "rms_norm_eps",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "sliding_window",
    "compress_rope_theta",
    "rope_theta",
    "max_position_embeddings",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_sinkhorn_iters",
    "hc_eps",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
_QUANT_BLOCK = 32  # columns that share one scale, in MXFP8 and in MXFP4
_MAX_TABLE_ROWS = 2**31 - 1  # row numbers of an Engram table are int32


def _require(is_met: bool, name: str, value: object, rule: str, action: str = "correct config.json") -> None:
    if not is_met:
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"ModelConfig: {name} is {shown!r}, expected {rule}; {action}")


def check_switches(text: Mapping[str, Any]) -> None:
    """Check the optional words of text_config that have no field of their own.

    Raises:
        ConfigError: a word asks for a forward pass that is not implemented.
    """
    for name, expected in _SWITCHES.items():
        value = text.get(name, expected)
        _require(
            value == expected,
            f"text_config.{name}",
            value,
            f"{expected!r} or no such field",
            "this checkpoint needs something that is not implemented",
        )
    name, sources = "index_k_source_layer_ids", text.get("kv_source_layer_ids")
    value = text.get(name, sources)
    _require(value == sources, f"text_config.{name}", value, f"kv_source_layer_ids {sources!r}")


def check_model_config(config: ModelConfig) -> None:
    """Check every field of a configuration.

    Raises:
        ConfigError: the first rule that is not met, with the field, its value and the rule.
    """
    _check_fixed(config)
    _check_numbers(config)
    _check_widths(config)
    _check_tokens(config)
    _check_ratios(config)
    _check_sources(config)
    _check_candidates(config)
    _check_engram(config)
    _check_draft(config)
    _check_vision(config)


def _check_fixed(config: ModelConfig) -> None:
    for path, expected in _FIXED.items():
        value: object = config
        for word in path.removeprefix("text_config.").split("."):
            value = getattr(value, word)
        shown = list(expected) if isinstance(expected, tuple) else expected
        _require(value == expected, path, value, f"{shown!r}", "only DeepSeek-V4.1-Flash as released is served")


def _check_numbers(config: ModelConfig) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        _require(value > 0, f"text_config.{name}", value, "a number above 0")
    _require(
        config.swiglu_limit >= 0, "text_config.swiglu_limit", config.swiglu_limit, "a number of at least 0 (0: off)"
    )
    for name, experts in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        chosen, available = getattr(config, name), getattr(config, experts)
        _require(chosen <= available, f"text_config.{name}", chosen, f"at most {experts} {available}")
    for name, theta in (("rope_theta", config.rope_theta), ("compress_rope_theta", config.compress_rope_theta)):
        _require(theta > 1, f"text_config.{name}", theta, "a number above 1")
    rope, path = config.rope_scaling, "text_config.rope_scaling"
    _require(rope.factor >= 1, f"{path}.factor", rope.factor, "a number of at least 1")
    _require(rope.beta_slow > 0, f"{path}.beta_slow", rope.beta_slow, "a number above 0")
    _require(
        rope.beta_fast > rope.beta_slow,
        f"{path}.beta_fast",
        rope.beta_fast,
        f"a number above beta_slow {rope.beta_slow}",
    )
    length = rope.original_max_position_embeddings
    _require(
        0 < length <= config.max_position_embeddings,
        f"{path}.original_max_position_embeddings",
        length,
        f"1 .. max_position_embeddings {config.max_position_embeddings}",
    )


def _check_widths(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "text_config.o_groups", groups, f"a divisor of num_attention_heads {heads}")
    group_width, low_rank = heads * config.head_dim // groups, groups * config.o_lora_rank
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "head_dim": config.head_dim,
        "num_attention_heads * head_dim / o_groups": group_width,
        "o_groups * o_lora_rank": low_rank,
        "moe_intermediate_size": config.moe_intermediate_size,
        "index_head_dim": config.index_head_dim,
        "engram_head_dim": config.engram_head_dim,
    }
    for name, width in widths.items():
        _require(
            width % _QUANT_BLOCK == 0, f"text_config.{name}", width, f"a multiple of {_QUANT_BLOCK}, one scale block"
        )
    rotary = config.qk_rope_head_dim
    limit = min(config.head_dim, config.index_head_dim)
    _require(
        rotary % 2 == 0 and rotary <= limit,
        "text_config.qk_rope_head_dim",
        rotary,
        f"an even number of at most head_dim and index_head_dim, {limit}",
    )


def _check_tokens(config: ModelConfig) -> None:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
    tokens = {name: getattr(config, name) for name in names}
    for name in ("engram_pad_token_id", "dspark_noise_token_id"):
        tokens[f"text_config.{name}"] = getattr(config, name)
    for name, token in tokens.items():
        _require(0 <= token < config.vocab_size, name, token, f"a token id below vocab_size {config.vocab_size}")


def _check_ratios(config: ModelConfig) -> None:
    name, ratios = "text_config.compress_ratios", config.compress_ratios
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    _require(drafts >= 0, "text_config.num_nextn_predict_layers", drafts, "a number of at least 0")
    _require(
        len(ratios) == layers + drafts,
        f"len({name})",
        len(ratios),
        f"num_hidden_layers + num_nextn_predict_layers = {layers} + {drafts} = {layers + drafts}",
    )
    _require(set(ratios) <= {0, 1, 2}, name, ratios, "only the ratios 0, 1 and 2")
    _require(not any(ratios[layers:]), name, ratios, f"0 for the last {drafts} entries, the draft blocks")
    _require(1 in ratios, name, ratios, "a layer with ratio 1, where the decoder begins")


def _check_sources(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_layer_list(config, name)
        _require(bool(getattr(config, name)), f"text_config.{name}", getattr(config, name), "at least one layer")
    kv_name, kv_sources = "text_config.kv_source_layer_ids", config.kv_source_layer_ids
    index_name, index_sources = "text_config.index_source_layer_ids", config.index_source_layer_ids
    missing = sorted(set(kv_sources) - set(index_sources))
    _require(not missing, index_name, index_sources, f"every KV source in it, but {missing} are not")
    first = kv_sources[0]
    _require(index_sources[0] == first, index_name, index_sources, f"no layer before the first KV source {first}")
    for layer in range(layers):
        where, ratio = f"text_config.compress_ratios[{layer}]", ratios[layer]
        if layer < first:
            _require(ratio == 0, where, ratio, f"0 before the first KV source, layer {first}")
        else:
            _require(ratio > 0, where, ratio, f"1 or 2 from the first KV source, layer {first}, on")
        if layer > first and ratio != ratios[layer - 1]:
            _require(
                layer in kv_sources,
                kv_name,
                kv_sources,
                f"layer {layer} in it, where the ratio changes from {ratios[layer - 1]} to {ratio}",
            )
    cut = config.cut_layer
    _require(cut in kv_sources, kv_name, kv_sources, f"layer {cut} in it, the first one with ratio 1")
    _require(kv_sources[-1] == cut, kv_name, kv_sources, f"no layer after {cut}: the decoder has one KV source")


def _check_layer_list(config: ModelConfig, name: str) -> None:
    value, layers = getattr(config, name), config.num_hidden_layers
    _require(
        list(value) == sorted(set(value)) and all(0 <= layer < layers for layer in value),
        f"text_config.{name}",
        value,
        f"ascending layer numbers below num_hidden_layers {layers}, each once",
    )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    _require(
        config.is_index_source(source) and config.ratio(source) == 1,
        "text_config.candidate_source_layer_id",
        source,
        f"an index source with ratio 1, one of "
        f"{[layer for layer in config.index_source_layer_ids if config.ratio(layer) == 1]}",
    )
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    # One block may hold a single visible entry; below this, top-k would run out of candidates and choose masked ones.
    reached = blocks * size - (size - 1)
    _require(
        reached >= config.index_topk,
        "text_config.candidate_topk_blocks",
        blocks,
        f"candidate_topk_blocks * candidate_block_size - (candidate_block_size - 1) = {reached} to be at least "
        f"index_topk {config.index_topk}",
    )


def _check_engram(config: ModelConfig) -> None:
    _check_layer_list(config, "engram_layer_ids")
    name, layers = "text_config.engram_layer_ids", config.engram_layer_ids
    cut = config.cut_layer
    _require(all(layer < cut for layer in layers), name, layers, f"only layers below {cut}, where the decoder begins")
    name, rows = "text_config.engram_num_embeddings", config.engram_num_embeddings
    _require(len(rows) == len(layers), name, rows, f"one number for each of engram_layer_ids {list(layers)}")
    _require(all(0 < n <= _MAX_TABLE_ROWS for n in rows), name, rows, f"numbers from 1 to {_MAX_TABLE_ROWS}")
    order = config.engram_max_ngram_size
    _require(order >= 2, "text_config.engram_max_ngram_size", order, "a number of at least 2")
    size = config.engram_compressed_vocab_size
    _require(
        size <= config.vocab_size,
        "text_config.engram_compressed_vocab_size",
        size,
        f"at most vocab_size {config.vocab_size}",
    )


def _check_draft(config: ModelConfig) -> None:
    _check_layer_list(config, "dspark_target_layer_ids")
    name, taps = "text_config.dspark_target_layer_ids", config.dspark_target_layer_ids
    if config.num_nextn_predict_layers:
        _require(bool(taps), name, taps, "at least one layer for the draft blocks to read")
    sides = {layer < config.cut_layer for layer in taps}
    _require(len(sides) <= 1, name, taps, f"all layers on one side of {config.cut_layer}, where the decoder begins")


def _check_vision(config: ModelConfig) -> None:
    vision = config.vision_config
    if vision is None:
        return
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "rope_theta",
        "downsample_ratio",
        "max_image_tokens",
        "min_pixels",
    ):
        _require(getattr(vision, name) > 0, f"vision_config.{name}", getattr(vision, name), "a number above 0")
    ratio = vision.max_wh_ratio
    _require(ratio is None or ratio >= 1, "vision_config.max_wh_ratio", ratio, "null or a number of at least 1")
    heads, width = vision.num_attention_heads, vision.hidden_size
    _require(
        width % (4 * heads) == 0,
        "vision_config.hidden_size",
        width,
        f"a multiple of 4 * num_attention_heads = {4 * heads} (two rotated axes per head)",
    )
