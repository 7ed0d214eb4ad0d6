"""config.json of the small checkpoints: every mechanism of the released model at sizes a CPU test can afford."""

from __future__ import annotations

from typing import Any

from deepinfer_plugin.reference.released_text import RELEASED_TEXT

# What both small models share. Engram heads, MX blocks and YaRN are as in the release, on smaller numbers.
_SHARED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "compress_rope_theta": 1000,
    "rope_theta": 100,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 4,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}

_SIZES: dict[str, dict[str, Any]] = {
    # Ten layers: two without compression, KV sources at 2 and 4 (ratio 2) and 5 (ratio 1), reindexing at 7 and 9.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0] * 2 + [2] * 3 + [1] * 5 + [0] * 3,
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7, 9],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [6126, 6332],
        "engram_vocab_size": 1000,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 512,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 509,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    # Seven layers, for tests that run many requests.
    "nano": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": [0] * 2 + [2] * 2 + [1] * 3 + [0] * 2,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [462, 630],
        "engram_vocab_size": 64,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 256,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 2,
        "dspark_noise_token_id": 253,
        "dspark_target_layer_ids": [4, 5, 6],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
}

# ``tiny`` with the released layers: 20 of the encoder, then 20 of the decoder with the four released reindexings.
_SIZES["deep"] = {
    **_SIZES["tiny"],
    "num_hidden_layers": 40,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
    "dspark_target_layer_ids": [37, 38, 39],
}

# ``nano`` with heads, groups, columns and blocks that eight ranks can share.
_SIZES["wide"] = {
    **_SIZES["nano"],
    "hidden_size": 256,
    "num_attention_heads": 8,
    "o_groups": 8,
    "engram_n_heads": 8,
    "engram_num_embeddings": [2946, 6076],
    "dspark_n_routed_experts": 8,
}

# Layers of the released width, for tests on a GPU, whose kernels choose tiles by it: two of the encoder, three of the
# decoder, 8 experts, a quarter of the vocabulary and Engram tables of a few thousand rows.
_OF_A_LAYER = (
    *("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
    *(
        "moe_intermediate_size",
        "num_experts_per_tok",
        "sliding_window",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
    ),
    *("candidate_topk_blocks", "candidate_block_size", "engram_n_heads", "engram_head_dim"),
    *("dspark_block_size", "dspark_markov_rank", "dspark_num_experts_per_tok"),
)
_SIZES["slice"] = {
    **{name: RELEASED_TEXT[name] for name in _OF_A_LAYER},
    "vocab_size": 32320,
    "num_hidden_layers": 5,
    "n_routed_experts": 8,
    "compress_ratios": [0, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [25874],
    "engram_vocab_size": 1000,
    "engram_compressed_vocab_size": 32320,
    "num_nextn_predict_layers": 1,
    "dspark_noise_token_id": 32317,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_n_routed_experts": 8,
}

# layers, width, heads and MLP width of the image tower; image tokens at most
_VISION_SIZES = {
    "deep": (2, 32, 2, 48, 64),
    "tiny": (2, 32, 2, 48, 64),
    "nano": (1, 16, 1, 32, 32),
    "wide": (1, 16, 1, 32, 32),
    "slice": (1, 16, 1, 32, 32),
}

SIZES = tuple(sorted(_SIZES))


def config_dict(name: str, swiglu_limit: float | None = None) -> dict[str, Any]:
    """config.json of a small checkpoint, in the nested form on disk.

    Args:
        name: "tiny", "nano", "deep", "wide" or "slice".
        swiglu_limit: None for the released 10.0; a small number makes the clamps fire.
    """
    text = {**_SHARED_TEXT, **_SIZES[name]}
    if swiglu_limit is not None:
        text["swiglu_limit"] = swiglu_limit
    layers, width, heads, inter, image_tokens = _VISION_SIZES[name]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "transformers_version": "5.6.0",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": text["vocab_size"] - 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": inter,
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": image_tokens,
            "min_pixels": 7056,
            "max_wh_ratio": None,
        },
    }
