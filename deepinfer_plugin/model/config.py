"""config.json of DeepSeek-V4.1-Flash, checked field by field.

Standard library only, so that a front-end process can check a checkpoint before it loads torch. The field names are
the words of config.json; what the fields must satisfy is in ``config_rules.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.config_fields import read_fields, refuse_unknown, section
from deepinfer_plugin.model.config_rules import check_model_config, check_switches

CONFIG_FILE = "config.json"
ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
# A configuration without Engram layers (a slice of the model) need not describe tables that it does not have.
_NO_ENGRAM: Mapping[str, Any] = {
    "engram_num_embeddings": [],
    "engram_vocab_size": 1,
    "engram_max_ngram_size": 2,
    "engram_n_heads": 1,
    "engram_head_dim": 64,
    "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 1,
}
_VLLM_QUANT_METHOD = "deepseek_v4_fp8"  # vLLM writes this word over "fp8" while it resolves its own method

_TOP_FIELDS = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
# Words of text_config that say nothing about the forward pass, or that are checked and not kept.
_KNOWN_TEXT_WORDS = frozenset({"model_type", "initializer_range", "use_cache", "expert_dtype", "dtype", "rope_scaling"})
# vision_config word -> attribute of vLLM's flattened configuration object.
_HF_VISION = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with a compression ratio above 0."""

    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Rotation of one layer: base, and YaRN scaling or None for the plain table."""

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Number formats of the weights; exactly one combination is served."""

    quant_method: str
    activation_scheme: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    expert_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The image tower and aligner."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything config.json says about the model, checked on construction.

    Raises:
        ConfigError: a field is missing, has the wrong type, or contradicts a rule or another field. The message
            names the field, its value and the rule.

    Source: REF, ModelArgs; V41, attention.py and nvidia/model.py for the constraints.
    """

    dtype: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantization_config: QuantizationConfig
    vision_config: VisionConfig | None

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    attention_bias: bool
    attention_dropout: float
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    tie_word_embeddings: bool

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float

    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    ignored_fields: tuple[str, ...] = ()  # words of config.json that nothing here reads, sorted; for the status table

    def __post_init__(self) -> None:
        check_model_config(self)

    # Building.

    @classmethod
    def from_dict(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        """Build from the nested form on disk, the parsed config.json.

        Raises:
            ConfigError: see the class.
        """
        for name, expected in (("model_type", MODEL_TYPE), ("architectures", [ARCHITECTURE])):
            if config_json.get(name) != expected:
                raise ConfigError(
                    f"ModelConfig: {name} is {config_json.get(name)!r}, expected {expected!r}; "
                    "point to a DeepSeek-V4.1-Flash checkpoint"
                )
        refuse_unknown(QuantizationConfig, section(config_json, "quantization_config"), "quantization_config")
        config = cls._build(config_json)
        known = {*cls.__dataclass_fields__, *_KNOWN_TEXT_WORDS}
        ignored = sorted(f"text_config.{name}" for name in config_json["text_config"] if name not in known)
        return replace(config, ignored_fields=tuple(ignored))

    @classmethod
    def from_model_dir(cls, model_dir: str | Path) -> ModelConfig:
        """Read and check the config.json of a checkpoint directory.

        Raises:
            ConfigError: the file is missing, is not a JSON object, or fails a check; the message names the file.
        """
        path = Path(model_dir) / CONFIG_FILE
        try:
            config_json = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"ModelConfig: {path} is unreadable ({error.strerror}), expected the model's config.json; "
                "point to a complete checkpoint directory"
            ) from error
        except ValueError as error:  # text that is not UTF-8, or not JSON
            raise ConfigError(
                f"ModelConfig: {path} is not valid JSON ({error}), expected one JSON object; download the file again"
            ) from error
        if not isinstance(config_json, dict):
            raise ConfigError(
                f"ModelConfig: {path} is a JSON {type(config_json).__name__}, expected one JSON object; "
                "download the file again"
            )
        try:
            return cls.from_dict(config_json)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, hf_config: Any) -> ModelConfig:
        """Build from vLLM's flattened DeepseekV41Config.

        Text fields are attributes of the object; vision fields carry the prefix ``vision_`` and vLLM's short names,
        where ``vision_n_layers`` 0 means that there is no vision tower. ``ignored_fields`` stays empty: the object
        mixes the words of config.json with attributes of transformers.

        Raises:
            ConfigError: see the class.
        """
        attributes = dict(vars(hf_config))
        rope = attributes.get("rope_parameters") or attributes.get("rope_scaling")
        if isinstance(rope, Mapping):  # transformers may add the base and the older word for rope_type
            rope = {name: value for name, value in rope.items() if name not in ("rope_theta", "type")}
        quantization = attributes.get("quantization_config")
        if quantization is not None and not isinstance(quantization, Mapping):
            quantization = quantization.to_dict()
        if isinstance(quantization, Mapping) and quantization.get("quant_method") == _VLLM_QUANT_METHOD:
            quantization = {**quantization, "quant_method": "fp8"}
        nested = {name: attributes[name] for name in _TOP_FIELDS if name in attributes}
        nested["dtype"] = str(attributes.get("dtype")).removeprefix("torch.")
        nested["quantization_config"] = quantization
        nested["text_config"] = attributes | {"rope_scaling": rope}
        if attributes.get("vision_n_layers"):
            nested["vision_config"] = {
                word: attributes[name] for word, name in _HF_VISION.items() if name in attributes
            }
        return cls._build(nested)

    @classmethod
    def _build(cls, nested: Mapping[str, Any]) -> ModelConfig:
        text = section(nested, "text_config")
        check_switches(text)
        if text.get("engram_layer_ids") in ([], ()):
            text = {**_NO_ENGRAM, **text}
        quantization = dict(section(nested, "quantization_config"))
        if "expert_dtype" in text:  # some mirrors keep it there
            declared = quantization.setdefault("expert_dtype", text["expert_dtype"])
            if declared != text["expert_dtype"]:
                raise ConfigError(
                    f"ModelConfig: text_config.expert_dtype is {text['expert_dtype']!r}, expected the value of "
                    f"quantization_config.expert_dtype {declared!r}; correct config.json"
                )
        rope = section(text, "text_config.rope_scaling")
        refuse_unknown(RopeScaling, rope, "text_config.rope_scaling")
        vision = section(nested, "vision_config") if nested.get("vision_config") else None
        text_fields = tuple(name for name in cls.__dataclass_fields__ if name not in _TOP_FIELDS)
        return cls(
            **read_fields(cls, nested, "", _TOP_FIELDS),
            **read_fields(cls, text, "text_config", text_fields),
            rope_scaling=RopeScaling(**read_fields(RopeScaling, rope, "text_config.rope_scaling")),
            quantization_config=QuantizationConfig(
                **read_fields(QuantizationConfig, quantization, "quantization_config")
            ),
            vision_config=VisionConfig(**read_fields(VisionConfig, vision, "vision_config")) if vision else None,
        )

    # What the fields mean for a layer. Backbone layers are 0 .. num_hidden_layers - 1, draft blocks follow.

    @property
    def cut_layer(self) -> int:
        """The first ratio-1 layer: encoder below it, decoder from it on."""
        return self.compress_ratios.index(1)

    @property
    def num_hc_mixes(self) -> int:
        """Rows of ``hc_*_fn``: pre and post per stream, and the stream-to-stream matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def num_engram_columns(self) -> int:
        """Rows looked up per token: one per n-gram order from 2 and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def ratio(self, layer: int) -> int:
        """Tokens per compressed KV entry of a layer; 0: the window only."""
        return self.compress_ratios[layer]

    def is_kv_source(self, layer: int) -> bool:
        """Whether the layer writes compressed KV and index keys."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether the layer runs the indexer."""
        return layer in self.index_source_layer_ids

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed KV and index keys this layer reads; None: it attends its window only."""
        return self._source(self.kv_source_layer_ids, layer)

    def index_source_of(self, layer: int) -> int | None:
        """The layer whose selection of entries this layer uses; None: it attends its window only."""
        return self._source(self.index_source_layer_ids, layer)

    def is_candidate_consumer(self, layer: int) -> bool:
        """Whether the layer selects inside the candidate blocks of ``candidate_source_layer_id``."""
        return self.is_index_source(layer) and layer > self.candidate_source_layer_id

    def engram_index(self, layer: int) -> int | None:
        """Position of the layer in ``engram_layer_ids``; None: it has no Engram memory."""
        return self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None

    def rope_parameters(self, layer: int) -> RopeParameters:
        """The rotation of every vector of a layer, its window keys included."""
        if self.ratio(layer) == 0:
            return RopeParameters(theta=self.rope_theta, scaling=None)
        return RopeParameters(theta=self.compress_rope_theta, scaling=self.rope_scaling)

    def _source(self, sources: tuple[int, ...], layer: int) -> int | None:
        if self.ratio(layer) == 0:
            return None
        return max(source for source in sources if source <= layer)
