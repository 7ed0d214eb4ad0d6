"""config.json: what is accepted, and what each refusal says."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config import ModelConfig, RopeParameters
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.reference.tiny_config import SIZES, config_dict

MISSING = object()


def changed(path: str, value: object) -> dict[str, Any]:
    """config.json of ``tiny`` with one word replaced, added or (``MISSING``) removed."""
    config_json = copy.deepcopy(config_dict("tiny"))
    *sections, word = path.split(".")
    target = config_json
    for name in sections:
        target = target[name]
    if value is MISSING:
        del target[word]
    else:
        target[word] = value
    return config_json


@pytest.mark.parametrize("name", SIZES)
def test_the_small_configurations_are_accepted(name: str) -> None:
    config = ModelConfig.from_dict(config_dict(name))
    assert config.ignored_fields == ()
    assert config.vision_config is not None


def test_the_released_configuration_is_accepted_and_layers_know_their_sources() -> None:
    config = ModelConfig.from_dict(released_config_dict())
    assert config.cut_layer == 20
    assert config.num_hc_mixes == 24
    assert config.num_engram_columns == 24
    assert [config.kv_source_of(layer) for layer in (1, 2, 7, 8, 19, 20, 39, 40)] == [None, 2, 2, 8, 14, 20, 20, None]
    assert [config.index_source_of(layer) for layer in (1, 7, 20, 23, 24, 39)] == [None, 2, 20, 20, 24, 36]
    assert [layer for layer in range(40) if config.is_candidate_consumer(layer)] == [24, 28, 32, 36]
    assert [config.engram_index(layer) for layer in (0, 1, 14)] == [None, 0, 1]
    assert config.rope_parameters(1) == RopeParameters(theta=10000.0, scaling=None)
    assert config.rope_parameters(2) == RopeParameters(theta=160000.0, scaling=config.rope_scaling)
    assert config.rope_parameters(42) == RopeParameters(theta=10000.0, scaling=None)


@pytest.mark.parametrize("name", SIZES)
def test_the_flattened_object_of_vllm_gives_the_same_configuration(name: str) -> None:
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    config_json = config_dict(name)
    flattened = DeepseekV41Config(**copy.deepcopy(config_json))
    assert ModelConfig.from_hf(flattened) == ModelConfig.from_dict(config_json)
    flattened.rope_parameters["rope_theta"] = 100  # vLLM adds it before the model is built
    assert ModelConfig.from_hf(flattened) == ModelConfig.from_dict(config_json)


def test_a_configuration_without_vision_is_accepted_in_both_forms() -> None:
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    config_json = changed("vision_config", MISSING)
    config = ModelConfig.from_dict(config_json)
    assert config.vision_config is None
    assert ModelConfig.from_hf(DeepseekV41Config(**copy.deepcopy(config_json))) == config


def test_a_slice_without_engram_layers_need_not_describe_tables() -> None:
    config_json = changed("text_config.engram_layer_ids", [])
    config_json["text_config"] = {
        word: value
        for word, value in config_json["text_config"].items()
        if word == "engram_layer_ids" or not word.startswith("engram_")
    }
    config = ModelConfig.from_dict(config_json)
    assert config.engram_num_embeddings == ()
    assert all(config.engram_index(layer) is None for layer in range(config.num_hidden_layers))


def test_words_that_nothing_reads_are_listed() -> None:
    config = ModelConfig.from_dict(changed("text_config.something_new", 1))
    assert config.ignored_fields == ("text_config.something_new",)


def test_expert_dtype_may_stand_in_text_config() -> None:
    config_json = changed("text_config.expert_dtype", "fp4")
    del config_json["quantization_config"]["expert_dtype"]
    assert ModelConfig.from_dict(config_json) == ModelConfig.from_dict(config_dict("tiny"))


TEXT = "text_config."
REFUSED: list[tuple[str, object, str]] = [
    # another model, another number format
    ("model_type", "deepseek_v4", "expected 'deepseek_v41'"),
    ("architectures", ["DeepseekV4ForCausalLM"], "expected ['DeepseekV41ForCausalLM']"),
    ("dtype", "float16", "expected 'bfloat16'"),
    ("quantization_config", MISSING, "expected a JSON object"),
    ("quantization_config.quant_method", "gptq", "expected 'fp8'"),
    ("quantization_config.activation_scheme", "static", "expected 'dynamic'"),
    ("quantization_config.weight_block_size", [128, 128], "expected [32, 32]"),
    ("quantization_config.scale_fmt", "float32", "expected 'ue8m0'"),
    ("quantization_config.expert_dtype", "fp8", "expected 'fp4'"),
    ("quantization_config.expert_dtype", MISSING, "expected a string"),
    ("quantization_config.modules_to_not_convert", ["head"], "expected only quant_method"),
    (TEXT + "expert_dtype", "fp8", "expected the value of quantization_config.expert_dtype 'fp4'"),
    # another forward pass
    (TEXT + "num_key_value_heads", 2, "expected 1"),
    (TEXT + "attention_bias", True, "expected False"),
    (TEXT + "attention_dropout", 0.1, "expected 0.0"),
    (TEXT + "hidden_act", "gelu", "expected 'silu'"),
    (TEXT + "scoring_func", "softmax", "expected 'sqrtsoftplus'"),
    (TEXT + "topk_method", "greedy", "expected 'noaux_tc'"),
    (TEXT + "norm_topk_prob", False, "expected True"),
    (TEXT + "n_shared_experts", 2, "expected 1"),
    (TEXT + "tie_word_embeddings", True, "expected False"),
    (TEXT + "hc_mult", 2, "expected 4"),
    (TEXT + "hc_shifted", False, "expected True or no such field"),
    (TEXT + "use_fp4_sparse_kv", False, "expected True or no such field"),
    (TEXT + "num_hash_layers", 3, "expected 0 or no such field"),
    (TEXT + "index_k_source_layer_ids", [2], "expected kv_source_layer_ids [2, 4, 5]"),
    # missing words, wrong types, numbers out of range
    ("text_config", MISSING, "expected a JSON object"),
    ("image_token_id", MISSING, "expected an integer"),
    (TEXT + "hidden_size", MISSING, "expected an integer"),
    (TEXT + "hidden_size", "128", "expected an integer"),
    (TEXT + "hidden_size", True, "expected an integer"),
    (TEXT + "hidden_size", 0, "expected a number above 0"),
    (TEXT + "norm_topk_prob", 1, "expected true or false"),
    (TEXT + "rms_norm_eps", None, "expected a finite number"),
    (TEXT + "swiglu_limit", -1.0, "expected a number of at least 0"),
    (TEXT + "compress_ratios", "02", "expected a list of integers"),
    (TEXT + "num_experts_per_tok", 9, "expected at most n_routed_experts 8"),
    (TEXT + "dspark_num_experts_per_tok", 5, "expected at most dspark_n_routed_experts 4"),
    (TEXT + "rope_theta", 1, "expected a number above 1"),
    (TEXT + "rope_scaling", None, "expected a JSON object"),
    (TEXT + "rope_scaling.rope_type", "linear", "expected 'yarn'"),
    (TEXT + "rope_scaling.mscale", 1.0, "expected only rope_type"),
    (TEXT + "rope_scaling.factor", 0.5, "expected a number of at least 1"),
    (TEXT + "rope_scaling.beta_slow", 0, "expected a number above 0"),
    (TEXT + "rope_scaling.beta_fast", 1, "expected a number above beta_slow 1.0"),
    (TEXT + "rope_scaling.original_max_position_embeddings", 8192, "expected 1 .. max_position_embeddings 4096"),
    # widths of the number formats
    (TEXT + "hidden_size", 144, "expected a multiple of 32"),
    (TEXT + "q_lora_rank", 48, "expected a multiple of 32"),
    (TEXT + "o_groups", 3, "expected a divisor of num_attention_heads 8"),
    (TEXT + "moe_intermediate_size", 40, "expected a multiple of 32"),
    (TEXT + "index_head_dim", 48, "expected a multiple of 32"),
    (TEXT + "engram_head_dim", 16, "expected a multiple of 32"),
    (TEXT + "qk_rope_head_dim", 15, "expected an even number"),
    (TEXT + "qk_rope_head_dim", 64, "expected an even number of at most head_dim and index_head_dim, 32"),
    # token ids
    ("image_token_id", 512, "expected a token id below vocab_size 512"),
    ("eos_token_id", -1, "expected a token id below vocab_size 512"),
    (TEXT + "engram_pad_token_id", 600, "expected a token id below vocab_size 512"),
    (TEXT + "dspark_noise_token_id", 600, "expected a token id below vocab_size 512"),
    # ratios and layer lists
    (TEXT + "compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1, 1, 1], "expected num_hidden_layers + num_nextn_predict_layers"),
    (TEXT + "compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 1], "expected 0 for the last 3 entries"),
    (TEXT + "compress_ratios", [0, 0, 4, 4, 4, 1, 1, 1, 1, 1, 0, 0, 0], "expected only the ratios 0, 1 and 2"),
    (TEXT + "compress_ratios", [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0], "expected a layer with ratio 1"),
    (
        TEXT + "compress_ratios",
        [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
        "expected 0 before the first KV source",
    ),
    (TEXT + "compress_ratios", [0, 0, 2, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0], "expected 1 or 2 from the first KV source"),
    (
        TEXT + "compress_ratios",
        [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "expected layer 6 in it, where",
    ),
    (TEXT + "kv_source_layer_ids", [], "expected at least one layer"),
    (TEXT + "kv_source_layer_ids", [4, 2, 5], "expected ascending layer numbers"),
    (TEXT + "kv_source_layer_ids", [2, 4, 5, 10], "expected ascending layer numbers below num_hidden_layers 10"),
    (TEXT + "kv_source_layer_ids", [2, 3, 4, 5], "expected every KV source in it, but [3] are not"),
    (TEXT + "kv_source_layer_ids", [2, 4], "expected layer 5 in it, where the ratio changes from 2 to 1"),
    (TEXT + "kv_source_layer_ids", [2, 4, 5, 7], "expected no layer after 5"),
    (TEXT + "index_source_layer_ids", [1, 2, 4, 5], "expected no layer before the first KV source 2"),
    (TEXT + "index_source_layer_ids", [2, 5, 7, 9], "expected every KV source in it, but [4] are not"),
    (TEXT + "candidate_source_layer_id", 4, "expected an index source with ratio 1, one of [5, 7, 9]"),
    (TEXT + "candidate_source_layer_id", 6, "expected an index source with ratio 1, one of [5, 7, 9]"),
    (TEXT + "candidate_topk_blocks", 2, "= 5 to be at least index_topk 8"),
    # Engram, draft, vision
    (TEXT + "engram_layer_ids", [1, 5], "expected only layers below 5"),
    (TEXT + "engram_layer_ids", [1], "expected one number for each of engram_layer_ids [1]"),
    (TEXT + "engram_num_embeddings", [6126, 2**31], "expected numbers from 1 to 2147483647"),
    (TEXT + "engram_max_ngram_size", 1, "expected a number of at least 2"),
    (TEXT + "engram_compressed_vocab_size", 513, "expected at most vocab_size 512"),
    (TEXT + "dspark_target_layer_ids", [4, 8], "expected all layers on one side of 5"),
    (TEXT + "dspark_target_layer_ids", [], "expected at least one layer"),
    ("vision_config.patch_size", 0, "expected a number above 0"),
    ("vision_config.hidden_size", 36, "expected a multiple of 4 * num_attention_heads = 8"),
    ("vision_config.min_pixels", MISSING, "expected an integer"),
    ("vision_config.max_wh_ratio", 0.5, "expected null or a number of at least 1"),
]
# Where the word that the message names is not the one that was changed.
NAMED_INSTEAD = {
    (TEXT + "engram_layer_ids", "expected one number for each of engram_layer_ids [1]"): "engram_num_embeddings",
    (TEXT + "kv_source_layer_ids", "expected every KV source in it, but [3] are not"): "index_source_layer_ids",
    (TEXT + "compress_ratios", "expected layer 6 in it, where"): "kv_source_layer_ids",
}


@pytest.mark.parametrize(("path", "value", "rule"), REFUSED)
def test_a_bad_field_is_named_with_its_value_and_the_rule(path: str, value: object, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed(path, value)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_model_dir(tmp_path)
    message = str(caught.value)
    named = NAMED_INSTEAD.get((path, rule))
    assert message.startswith(f"{file}: ModelConfig: ")
    assert (named or path) in message
    assert rule in message
    assert "; " in message, "the message does not say what to do"
    if value is MISSING:
        assert "is missing" in message
    elif named is None and not isinstance(value, list | dict) and value is not None:
        assert repr(value) in message


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "is unreadable (No such file or directory)"),
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON"),
        (b"[]", "is a JSON list"),
    ],
)
def test_a_bad_file_is_named(content: bytes | None, found: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_model_dir(tmp_path)
    assert f"{file} {found}" in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_bad_field_in_the_flattened_object_is_named() -> None:
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    flattened = DeepseekV41Config(**config_dict("tiny"))
    flattened.kv_source_layer_ids = [2, 4]
    with pytest.raises(ConfigError, match=r"text_config.kv_source_layer_ids is \[2, 4\], expected layer 5 in it"):
        ModelConfig.from_hf(flattened)


def test_checking_a_configuration_loads_no_torch() -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; "
        "from deepinfer_plugin.model.config import ModelConfig; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
